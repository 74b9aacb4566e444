"""`--base-stats random`: a merge that runs its base itself, once, and keeps what its layers see."""

import json
import os
import shutil
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

import covmerge
from covmerge.errors import InputError, RecipeError, ResourceError
from covmerge.files.checkpoints import open_checkpoint
from covmerge.files.stores.lock import Lock
from covmerge.plan.statistics import Generated, StatisticsFile, base_inputs, of_base
from covmerge.run.recompute import recompute
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.models import build
from tests.e2e.test_adapters import TARGETS, save_adapter
from tests.statistics.models import save, save_family

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LAYER = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "cache"))
    base, experts = save_family(build("llama"), tmp_path)
    return base, experts


@pytest.fixture
def never_run(monkeypatch):
    def run(*args, **kwargs):
        pytest.fail("the base was run")

    monkeypatch.setattr("covmerge.plan.statistics.of_base.collect", run)


def kept(folder):
    return sorted((folder / "cache" / "base-inputs").glob("*.covstats.safetensors"))


def test_it_is_what_collect_makes_and_is_made_once(models, tmp_path, monkeypatch):
    base, experts = models
    out, again, named = (tmp_path / name for name in ("out", "again", "named"))
    first = covmerge.merge(base, experts, out=out, base_statistics="random")
    assert first.recipe.method == "auto" and first.run["base_inputs_seconds"] > 0.0
    assert any("256 random inputs through the base" in note for note in first.notes)
    assert len(kept(tmp_path)) == 1
    file = tmp_path / "base.covstats.safetensors"
    covmerge.collect(base, Generated("random"), file)
    covmerge.merge(base, experts, out=named, base_statistics=file)
    weights = [path / "model.safetensors" for path in (out, named)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    manifest = json.loads((out / "covmerge.json").read_text())
    assert manifest["tensors"][LAYER]["matrices"][0]["inputs_known"] is True
    source = manifest["sources"]["statistics base inputs"]
    assert source["source"] == "random" == manifest["recipe"]["base_statistics"]
    assert source["content"]["generated"]["seed"] == 0
    assert "running it on random ones" in words((out / "README.md").read_text())

    def fail(*args, **kwargs):
        pytest.fail("the base was run again")

    with monkeypatch.context() as patched:
        patched.setattr("covmerge.plan.statistics.of_base.collect", fail)
        # However the base is named: what is written knows nothing of the cache.
        second = covmerge.merge(str(base), experts, out=again, base_statistics="random")
        assert second.run["base_inputs_seconds"] == 0.0
        assert (again / "covmerge.json").read_bytes() == (out / "covmerge.json").read_bytes()
        assert recompute(out).ok
        assert covmerge.report(out, spectra="none").noticed[LAYER].matrices[0].inputs_known
    # What is kept is no more than a cache, and may be damaged or gone.
    whole = kept(tmp_path)[0].read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    kept(tmp_path)[0].write_bytes(whole[:header] + b"\xff" * (len(whole) - header))
    covmerge.merge(base, experts, out=tmp_path / "anew", base_statistics="random")
    assert (tmp_path / "anew" / "model.safetensors").read_bytes() == weights[0].read_bytes()
    kept(tmp_path)[0].write_bytes(b"nothing")
    assert recompute(out).ok and len(kept(tmp_path)) == 1


@pytest.mark.parametrize("given", ["random", "a file"])
def test_a_comparison_writes_models_that_can_be_computed_again(models, tmp_path, given):
    """Their recipes have the base's inputs where the method looks at them, and else no word of them."""
    (base, experts), out, file = models, tmp_path / "compared", "random"
    if given == "a file":
        file = tmp_path / "base.covstats.safetensors"
        covmerge.collect(base, Generated("random"), file)
    covmerge.compare(base, experts, ["auto", "ties"], out=out, base_statistics=file)
    for method, looks in (("auto", True), ("ties", False)):
        manifest = json.loads((out / method / "covmerge.json").read_text())
        assert ("base_statistics" in manifest["recipe"]) is looks
        assert ("statistics base inputs" in manifest["sources"]) is looks
        told = any("the base's layers see" in note for note in manifest["notes"])
        assert told is (looks and file == "random")
        assert recompute(out / method).ok
        assert covmerge.report(out / method, spectra="none").manifest["recipe"]["method"] == method


def test_on_the_command_line_and_in_a_recipe(models, tmp_path):
    base, experts = models
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("{base: base, base_statistics: random, experts: {e1: e1, e2: e2}}")
    ran = command("merge", recipe, tmp_path / "one")
    assert "the base's inputs took" in words(ran.stdout)
    flags = ["--base", base, "--base-stats", "random"]
    flags += [f"--expert={name}={path}" for name, path in experts.items()]
    ran = command("merge", *flags, tmp_path / "two")
    assert "the base's inputs were there from an earlier run" in words(ran.stdout)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    merged, start = load_file(one)[LAYER], load_file(base / "model.safetensors")[LAYER]
    assert not torch.equal(merged, start)
    rows = command("compare", *flags, "--methods=auto,average").stdout
    assert "auto" in rows


def test_a_plan_runs_nothing_and_says_what_it_will_take(models, tmp_path, never_run):
    base, experts = models
    flags = ["--base", base, *(f"--expert={n}={p}" for n, p in experts.items())]
    planned = words(command("merge", *flags, "--base-stats", "random", "--dry-run").stdout)
    assert "by auto" in planned and "256 random inputs through the base, in 5" in planned
    without = words(command("merge", *flags, "--dry-run").stdout)
    assert "by auto" in without and "what the base's layers see is not known" in without


def test_it_is_refused_before_the_base_is_run(models, tmp_path, never_run):
    base, experts = models
    with pytest.raises(RecipeError, match="random: method 'ties' does not look"):
        covmerge.merge(base, experts, "ties", base_statistics="random")
    with pytest.raises(RecipeError, match=r"random: no method of these looks"):
        covmerge.compare(base, experts, ["ties", "average"], base_statistics="random")
    with pytest.raises(RecipeError, match="random: one expert alone"):
        covmerge.merge(base, {"e1": experts["e1"]}, base_statistics="random")
    with pytest.raises(
        ResourceError, match=r"GiB are allowed .* leave out base_statistics=.random"
    ):
        covmerge.merge(base, experts, base_statistics="random", max_memory="100MB")
    assert not kept(tmp_path)


def test_a_base_that_cannot_be_run(models, tmp_path):
    _, experts = models
    weights = {name: load_file(path / "model.safetensors") for name, path in experts.items()}
    with pytest.raises(InputError, match=r"no config\.json, by which the model could be built"):
        covmerge.merge(weights["e1"], weights, base_statistics="random")
    (experts["e1"] / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        covmerge.merge(experts["e1"], experts, base_statistics="random")
    assert not kept(tmp_path)


def test_another_tokenizer_draws_other_inputs(models):
    base, experts = models
    covmerge.merge(base, experts, "auto", base_statistics="random")
    vocabulary = base / "tokenizer.json"
    told = json.loads(vocabulary.read_text())
    told["model"]["vocab"] = {word: 1000 + n for word, n in told["model"]["vocab"].items()}
    vocabulary.write_text(json.dumps(told))
    with pytest.raises(InputError, match="has no words"):
        covmerge.merge(base, experts, "auto", base_statistics="random")


def test_only_so_much_is_kept(models, tmp_path, monkeypatch):
    """And what was used within a day, which a merge may still be reading."""
    base, experts = models
    monkeypatch.setattr("covmerge.plan.statistics.of_base._KEPT_BYTES", 0)

    def made(folder):
        with closing(open_checkpoint(folder)) as opened:
            return base_inputs(opened, device=torch.device("cpu")).path

    first, second = made(base), made(experts["e1"])
    assert made(base) == first  # noted as used
    assert kept(tmp_path) == sorted([first, second])
    long_ago = time.time() - 2 * 24 * 3600
    for path in first.parent.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert made(experts["e1"]) == second
    third = made(experts["e2"])
    assert kept(tmp_path) == sorted([second, third])
    assert not first.with_name(first.name.removesuffix(".covstats.safetensors") + ".used").exists()


def test_a_merge_changes_nothing_for_another_that_reads_the_file(models, tmp_path):
    base, experts = models
    covmerge.merge(base, experts, out=tmp_path / "first", base_statistics="random")
    with closing(StatisticsFile.open(kept(tmp_path)[0])) as read_by_another:
        covmerge.merge(base, experts, out=tmp_path / "second", base_statistics="random")
        assert read_by_another.read("gram", LAYER).shape[0] > 0


def test_who_comes_while_it_is_made_waits_for_it(models, monkeypatch):
    """As merges of one base do that are started together."""
    base, _ = models
    made, begun = [], threading.Event()
    collect = of_base.collect

    def slowly(*args, **kwargs):
        begun.set()
        time.sleep(1.0)
        made.append(collect(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(of_base, "collect", slowly)

    def run():
        with closing(open_checkpoint(base)) as opened:
            return base_inputs(opened, device=torch.device("cpu"))

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run)
        assert begun.wait(60)
        with pytest.warns(UserWarning, match="another process runs .* waits for it"):
            second = run()
    assert len(made) == 1 and second.seconds is None
    assert first.result().path == second.path
    assert sorted(path.name for path in second.path.parent.iterdir()) == sorted(
        [second.path.name, second.path.name.removesuffix(".covstats.safetensors") + ".used"]
    )


def test_of_adapters_folded_or_as_an_adapter(models, tmp_path):
    base, _ = models
    experts = {}
    for seed in (1, 2):
        save_adapter(build("llama"), tmp_path / f"a{seed}", seed=seed, targets=TARGETS["llama"])
        experts[f"a{seed}"] = tmp_path / f"a{seed}" / "adapter"
    folded = covmerge.merge(base, experts, base_statistics="random").tensors
    out = tmp_path / "adapter"
    made = covmerge.merge(base, experts, out=out, form="adapter", base_statistics="random")
    assert made.recipe.method == "auto" and made.run["base_inputs_seconds"] == 0.0
    again = covmerge.merge(base, {"merged": out}).tensors
    for name, value in folded.items():
        torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-5)


def test_the_cache_may_change_while_it_is_made(models, monkeypatch):
    """The work is not lost with what lay beside it, and an error stays the one that it was."""
    base, _ = models
    collect = of_base.collect

    def disturbed(base, examples, out, **options):
        (making,) = out.parent.glob(".making-*")
        shutil.rmtree(making)
        (out.parent / "gone.covstats.safetensors").symlink_to(out.parent / "nowhere")
        return collect(base, examples, out, **options)

    def failing(base, examples, out, **options):
        shutil.rmtree(out.parent)
        raise InputError("what went wrong first")

    with closing(open_checkpoint(base)) as opened:
        monkeypatch.setattr(of_base, "collect", failing)
        with pytest.raises(InputError, match="what went wrong first"):
            base_inputs(opened, device=torch.device("cpu"))
        monkeypatch.setattr(of_base, "collect", disturbed)
        made = base_inputs(opened, device=torch.device("cpu"))
        assert made.seconds is not None and made.path.exists()
        assert base_inputs(opened, device=torch.device("cpu")).seconds is None


def test_what_cannot_be_removed_stays_and_nobody_waits_for_it(models, monkeypatch):
    base, experts = models

    remove_folder = Lock.remove_folder

    def refuse(self, only=None):
        if self._path.parent.name.startswith(".making-"):
            raise PermissionError(1, "Operation not permitted")
        remove_folder(self, only)

    with closing(open_checkpoint(base)) as one, closing(open_checkpoint(experts["e1"])) as other:
        with monkeypatch.context() as patched:
            patched.setattr(Lock, "remove_folder", refuse)
            path = base_inputs(one, device=torch.device("cpu")).path
        path.write_bytes(b"damaged")
        assert base_inputs(one, device=torch.device("cpu")).seconds is not None
        monkeypatch.setattr(of_base, "_KEPT_BYTES", 0)
        monkeypatch.setattr(of_base, "_IN_USE", -1.0)
        unlink = Path.unlink

        def kept_by_another(self, missing_ok=False):
            if self == path:
                raise PermissionError(1, "Operation not permitted")
            unlink(self, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", kept_by_another)
        assert base_inputs(other, device=torch.device("cpu")).path.exists() and path.exists()


def _other_model(path: Path, folder: Path) -> None:
    """Put what another base's layers see in the place of this one's."""
    other = save(build("llama"), folder / "other")
    tensors = load((other / "model.safetensors").read_bytes())
    save_file({n: 2 * w for n, w in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    covmerge.collect(other, Generated("random"), path, overwrite=True)


def _value(value: float):
    """Change the last number of the last Gram matrix."""

    def change(path: Path, _: Path) -> None:
        path.write_bytes(path.read_bytes()[:-4] + struct.pack("<f", value))

    return change


POISONED = {
    "empty": lambda path, _: path.write_bytes(b""),
    "cut short": lambda path, _: path.write_bytes(path.read_bytes()[:-100]),
    "NaN": _value(float("nan")),
    "negative": _value(-1e3),
    "another value": _value(0.5),
    "another model": _other_model,
}


@pytest.mark.parametrize("how", POISONED)
def test_a_kept_file_that_is_not_what_was_made_is_made_again(models, tmp_path, how):
    """A changed value, or another model's, was used or stopped each merge from then on."""
    base, _ = models
    with closing(open_checkpoint(base)) as opened:
        path = base_inputs(opened, device=torch.device("cpu")).path
        right = load(path.read_bytes())  # mapped, it would change with the file
        POISONED[how](path, tmp_path)
        made = base_inputs(opened, device=torch.device("cpu"))
        assert made.seconds is not None
        found = load_file(path)
        assert found.keys() == right.keys()
        assert all(torch.equal(found[name], right[name]) for name in right)
        assert base_inputs(opened, device=torch.device("cpu")).seconds is None
