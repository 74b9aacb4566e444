"""Where nothing is said of the base's inputs: the merge makes them if it can, or says why not."""

import json

import psutil
import pytest
from safetensors.torch import load_file

import covmerge
from covmerge.errors import InputError, ResourceError
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine import RunOptions
from covmerge.run.recompute import recompute
from covmerge.run.sources import open_recipe
from covmerge.run.unsaid import why_not
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.models import build
from tests.e2e.test_adapters import TARGETS, save_adapter
from tests.interrupted import InterruptAfter
from tests.statistics.models import save_family

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out")


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("covmerge.run.unsaid.why_not", why_not)  # which other tests go without
    return save_family(build("llama"), tmp_path)


@pytest.fixture
def never_run(monkeypatch):
    def run(*args, **kwargs):
        pytest.fail("the base was run")

    monkeypatch.setattr("covmerge.plan.statistics.of_base.collect", run)


def not_known(result):
    (note,) = (note for note in result.notes if "the base's layers see is not known" in note)
    return note


def test_full_models_are_merged_by_auto_with_the_base_inputs(models, tmp_path):
    base, experts = models
    out, asked = tmp_path / "out", tmp_path / "asked"
    result = covmerge.merge(base, experts, out=out)
    assert result.recipe.method == "auto" and result.recipe.base_statistics == "random"
    assert result.run["base_inputs_seconds"] > 0.0
    assert any("told by 256 random inputs through the base" in note for note in result.notes)
    named = covmerge.merge(base, experts, "auto", out=asked, base_statistics="random")
    assert named.run["base_inputs_seconds"] == 0.0
    for name, tensor in load_file(out / "model.safetensors").items():
        assert tensor.equal(load_file(asked / "model.safetensors")[name])
    assert recompute(out).ok
    assert covmerge.merge(base, experts, "auto").run["base_inputs_seconds"] == 0.0


def test_a_comparison_has_them_too(models):
    base, experts = models
    compared = covmerge.compare(base, experts, ["auto", "average"])
    alone = covmerge.compare(base, experts, ["auto", "average"], base_statistics="none")
    assert compared.rows[0].cosines != pytest.approx(alone.rows[0].cosines, rel=1e-3)
    assert compared.rows[1].norm == alone.rows[1].norm


@pytest.mark.parametrize("given", [{"method": "ace"}, {"base_statistics": "none"}])
def test_it_is_not_run_for_nothing(models, never_run, given):
    base, experts = models
    result = covmerge.merge(base, experts, **given)
    assert result.recipe.method == given.get("method", "auto")
    assert not any("not known" in note for note in result.notes)
    one = covmerge.merge(base, {"a": next(iter(experts.values()))})
    assert one.recipe.method == "average"


def test_auto_by_weights_alone_can_be_asked_for(models, never_run, tmp_path):
    base, experts = models
    out = tmp_path / "out"
    covmerge.merge(base, experts, "auto", out=out, base_statistics="none")
    recorded = json.loads((out / "covmerge.json").read_text())["recipe"]
    assert recorded["base_statistics"] == "none"
    assert recompute(out).ok


def test_too_little_memory_is_said(models, never_run):
    base, experts = models
    enough_to_merge = psutil.Process().memory_info().rss + 400 * 2**20
    result = covmerge.merge(base, experts, max_memory=enough_to_merge)
    assert result.recipe.method == "auto" and result.recipe.base_statistics == "none"
    assert "to run the base takes" in not_known(result) and "--max-memory" in not_known(result)


def test_too_little_disk_is_said(models, never_run, monkeypatch):
    base, experts = models
    monkeypatch.setattr("covmerge.run.unsaid.free_bytes", lambda folder: 1000)
    told = not_known(covmerge.merge(base, experts))
    assert "what it sees takes 16.9 kB of disk" in told and "has 1.00 kB free" in told
    monkeypatch.setattr("covmerge.plan.statistics.needed.free_bytes", lambda folder: 1000)
    with pytest.raises(ResourceError, match=r"free some, or name another folder by COVMERGE_CACHE"):
        covmerge.merge(base, experts, base_statistics="random")


def test_what_was_made_needs_no_disk(models, monkeypatch, tmp_path):
    base, experts = models
    covmerge.merge(base, experts)
    (file,) = (tmp_path / "cache" / "base-inputs").glob("*.covstats.safetensors")
    for where in ("covmerge.run.unsaid", "covmerge.plan.statistics.needed"):
        monkeypatch.setattr(f"{where}.free_bytes", lambda folder: 1000)
    result = covmerge.merge(base, experts)
    assert result.recipe.base_statistics == "random"
    assert result.run["base_inputs_seconds"] == 0.0
    file.write_bytes(file.read_bytes()[:1000])  # it is not whole
    assert "of disk" in not_known(covmerge.merge(base, experts))
    file.unlink()
    assert "of disk" in not_known(covmerge.merge(base, experts))


def test_a_device_that_is_not_here_is_not_asked_what_was_made(models, monkeypatch):
    base, experts = models
    monkeypatch.setattr("covmerge.run.unsaid.free_bytes", lambda folder: 1000)
    recipe = parse_recipe({"base": str(base), "experts": paths(experts)})
    with open_recipe(recipe) as opened:
        settled = opened.settled([recipe], RunOptions(device="cuda:99"))
    assert settled.why_not is not None and "of disk" in settled.why_not


def test_no_config_is_said(models, never_run):
    base, experts = models
    (base / "config.json").unlink()
    assert "no config.json" in not_known(covmerge.merge(base, experts))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"model_type": "strange"}, "model_type 'strange' is unknown to transformers"),
        ({"num_attention_heads": "many"}, "from this config.json ("),
    ],
)
def test_a_base_that_transformers_does_not_build_is_said_with_the_reason(
    own, said, models, never_run
):
    base, experts = models
    for folder in (base, *experts.values()):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **own}))
    assert said in not_known(covmerge.merge(base, experts))


def test_a_base_that_cannot_be_run_after_all_is_said(models, monkeypatch):
    def fail(*args, **kwargs):
        raise InputError("no inputs for such a model")

    monkeypatch.setattr("covmerge.plan.statistics.of_base.collect", fail)
    base, experts = models
    result = covmerge.merge(base, experts)
    assert result.recipe.method == "auto"
    assert "could not be run (no inputs for such a model)" in not_known(result)
    with pytest.raises(InputError, match="no inputs for such a model"):
        covmerge.merge(base, experts, base_statistics="random")


def test_an_adapter_of_adapters_needs_nothing_of_its_base(tmp_path, models, never_run):
    base = build("llama")
    experts = {}
    for seed in (1, 2):
        save_adapter(base, tmp_path / f"lora{seed}", seed=seed, targets=TARGETS["llama"])
        experts[f"e{seed}"] = tmp_path / f"lora{seed}" / "adapter"
    result = covmerge.merge(models[0], experts, out=tmp_path / "out", form="adapter")
    assert result.recipe.method == "auto"
    assert "an adapter of adapters needs nothing of its base" in not_known(result)


@pytest.mark.parametrize("name", ["clip", "llama"])
def test_whatever_a_strangers_model_does_is_said(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("covmerge.run.unsaid.why_not", why_not)
    if name == "llama":  # one whose layers fail in a way of their own; clip fails by itself

        def fail(*args, **kwargs):
            raise AttributeError("no such thing")

        monkeypatch.setattr("covmerge.plan.statistics.of_base.collect", fail)
    base, experts = save_family(build(name), tmp_path)
    result = covmerge.merge(base, experts, out=tmp_path / "out")
    assert result.recipe.method == "auto"
    assert "cannot be run: " in not_known(result)
    with pytest.raises(InputError, match="cannot be run: "):
        covmerge.merge(base, experts, base_statistics="random")


def test_a_merge_by_what_was_made_is_resumed(models, tmp_path, monkeypatch):
    base, experts = models
    covmerge.merge(base, experts, out=tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        covmerge.merge(base, experts, out=tmp_path / "out", progress=InterruptAfter(6))
    covmerge.merge(base, experts, "auto")  # another merge by the same file
    # The file itself took the room that there was.
    monkeypatch.setattr("covmerge.run.unsaid.free_bytes", lambda folder: 1000)
    resumed = covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
    assert resumed.run["resumed_items"] > 0
    for name, tensor in load_file(tmp_path / "undisturbed" / "model.safetensors").items():
        assert tensor.equal(load_file(tmp_path / "out" / "model.safetensors")[name])


def test_other_processes_do_not_mind_that_others_use_the_file(models):
    base, experts = models
    with open_recipe(parse_recipe({"base": str(base), "experts": paths(experts)})) as opened:
        _, checkpoints = opened.plans_to_run(
            [parse_recipe({"base": str(base), "experts": paths(experts)})], RunOptions()
        )
        opener = checkpoints.opener()
        checkpoints.made.path.touch()  # as by another merge that looks at it
        with opener() as sources:
            assert sources is not None


def paths(experts):
    return {name: str(path) for name, path in experts.items()}


def test_an_inspection_says_it(models, never_run):
    base, experts = models
    (text,) = (f.text for f in covmerge.inspect(base, experts).findings if "no method" in f.text)
    assert text.endswith("; the base is run first, for what its layers see")


def test_the_dry_run_says_it_and_an_output_in_the_way_comes_first(models, never_run, tmp_path):
    base, experts = models
    flags = [f"--expert={name}={path}" for name, path in experts.items()]
    shown = words(command("merge", "--base", base, *flags, "--dry-run").stdout)
    assert "auto" in shown and "256 random inputs through the base" in shown
    (tmp_path / "out").mkdir()
    ran = command("merge", "--base", base, *flags, tmp_path / "out", code=2)
    assert "exists" in words(ran.stderr)
