"""`auto` with what the base's layers see: from disk as in memory, and refused where it does not fit."""

import json
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

import covmerge
from covmerge import LowRank
from covmerge.errors import InputError, RecipeError
from covmerge.files.checkpoints import open_checkpoint
from covmerge.plan.statistics import StatisticsFile
from covmerge.plan.statistics.write import Contents, Statistic, write_statistics
from covmerge.run.recompute import recompute
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.models import build, fine_tuned
from tests.e2e.test_adapters import TARGETS, save_adapter
from tests.forked import fork_workers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LAYER = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def models(tmp_path):
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        fine_tuned(base, seed).save_pretrained(tmp_path / f"e{seed}")
        save_adapter(base, tmp_path / f"a{seed}", seed=seed, targets=TARGETS["llama"])
    ids = torch.randint(0, base.config.vocab_size, (8, 16), generator=torch.manual_seed(0))
    covmerge.collect(
        tmp_path / "base", [{"input_ids": ids}], tmp_path / "base.covstats.safetensors"
    )
    return tmp_path


def keep_layers(file, out, wanted, also=None):
    """Write a statistics file of some of the layers of another."""
    held = StatisticsFile.open(file)
    names = [name for name in held.names("gram") if wanted(name)]
    found = [Statistic((name,), held.read("gram", name), 1) for name in names]
    if also is not None:
        found.append(Statistic((also,), torch.eye(4), 1))
    with closing(open_checkpoint(held.about.source)) as model:
        contents = Contents(model, {"gram": found}, examples=1)
        write_statistics({out: contents}, overwrite=True)


def full(folder):
    return {f"e{n}": folder / f"e{n}" for n in (1, 2)}


def adapters(folder):
    return {f"e{n}": folder / f"a{n}" / "adapter" for n in (1, 2)}


@pytest.mark.parametrize("workers", [1, 2])
def test_layers_are_merged_with_their_own_inputs(models, workers, monkeypatch):
    fork_workers(monkeypatch)
    file = models / "base.covstats.safetensors"
    result = covmerge.merge(
        models / "base", full(models), out=models / "out", base_statistics=file, workers=workers
    )
    weights = [load_file(models / f / "model.safetensors")[LAYER] for f in ("base", "e1", "e2")]
    updates = [weights[1] - weights[0], weights[2] - weights[0]]
    inputs = StatisticsFile.open(file).read("gram", LAYER)
    expected = covmerge.merge_layer(updates, "auto", base_inputs=inputs, base=weights[0])
    merged = load_file(models / "out" / "model.safetensors")[LAYER] - weights[0]
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-6)
    without = covmerge.merge_layer(updates, "auto", base=weights[0])
    assert (expected - without).norm() > 1e-2 * without.norm()
    manifest = json.loads((models / "out" / "covmerge.json").read_text())
    assert manifest["sources"]["statistics base inputs"]["source"] == str(file)
    assert manifest["tensors"][LAYER]["matrices"][0]["inputs_known"] is True
    assert "collected beforehand: base.covstats.safetensors" in words(
        (models / "out" / "README.md").read_text()
    )
    assert recompute(models / "out").ok
    assert result.recipe.base_statistics == str(file)


def test_adapters_on_their_factors(models):
    file = models / "base.covstats.safetensors"
    experts = adapters(models)
    folded = covmerge.merge(models / "base", experts, base_statistics=file).tensors
    out = models / "adapter"
    covmerge.merge(models / "base", experts, out=out, form="adapter", base_statistics=file)
    again = covmerge.merge(models / "base", {"merged": out}).tensors
    for name, value in folded.items():
        torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", [LAYER]), ("gpt2", ["h.0.attn.c_proj.weight", "h.0.mlp.c_fc.weight"])],
    ids=["llama", "gpt2"],
)
def test_long_updates_are_held_beside_what_the_base_gives(tmp_path, name, layers):
    """Of Conv1D weights too, which are stored turned, square ones among them."""
    base = build(name)
    base.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        fine_tuned(base, seed, scale=0.03 * seed).save_pretrained(tmp_path / f"e{seed}")
    ids = torch.randint(0, base.config.vocab_size, (64, 32), generator=torch.manual_seed(0))
    file = tmp_path / "base.covstats.safetensors"
    covmerge.collect(tmp_path / "base", [{"input_ids": ids}], file)
    merged = covmerge.merge(tmp_path / "base", full(tmp_path), "auto", base_statistics=file)
    held = StatisticsFile.open(file)
    stored = [load_file(tmp_path / f / "model.safetensors") for f in ("base", "e1", "e2")]
    for layer in layers:
        own = next(key for key in stored[0] if key.endswith(layer))
        weights = [each[own].mT if name == "gpt2" else each[own] for each in stored]
        updates = [weights[1] - weights[0], weights[2] - weights[0]]
        found = merged.tensors[own].mT if name == "gpt2" else merged.tensors[own]
        inputs = held.read("gram", next(key for key in held.names("gram") if key.endswith(layer)))
        free = covmerge.merge_layer(updates, "auto", base_inputs=inputs)
        (facts,) = merged.stats["tensors"][own]["matrices"]
        outputs = [float((w @ inputs * w).sum()) ** 0.5 for w in (free, weights[0])]
        together = sum(float(update.square().sum()) for update in updates)
        rho = together**0.5 / float(weights[0].norm())
        left = (1 + (outputs[0] / outputs[1] / 0.15) ** 4) ** -0.25 / (1 + rho**4)
        assert facts["towards_average"] == pytest.approx(1 - left, rel=0.02)
        assert 0.2 < facts["towards_average"] < 0.98
        expected = covmerge.merge_layer(updates, "auto", base_inputs=inputs, base=weights[0])
        torch.testing.assert_close(found - weights[0], expected, rtol=1e-4, atol=1e-5)


def test_factors_are_held_as_the_folded_are(models):
    file = models / "base.covstats.safetensors"
    experts = adapters(models)
    merges = [
        covmerge.merge(models / "base", experts, "auto", base_statistics=file),
        covmerge.merge(
            models / "base", experts, "auto", base_statistics=file, form="adapter", out=models / "a"
        ),
    ]
    away = [
        [
            m["towards_average"]
            for t in merge.stats["tensors"].values()
            for m in t.get("matrices", [])
        ]
        for merge in merges
    ]
    assert away[1] == pytest.approx(away[0], rel=1e-3) and max(away[0]) > 0.01


def test_of_another_model(models):
    covmerge.collect(
        models / "e1",
        [{"input_ids": torch.ones(2, 4, dtype=torch.long)}],
        models / "e1.covstats.safetensors",
    )
    with pytest.raises(InputError, match="has other weights than the base"):
        covmerge.merge(
            models / "base", full(models), base_statistics=models / "e1.covstats.safetensors"
        )


@pytest.mark.parametrize(
    ("given", "meant"),
    [("rndom", "Did you mean 'random'?"), ("base.covstat", "are a file, 'random' or 'none'.")],
)
def test_a_file_that_is_not_there(models, given, meant):
    with pytest.raises(InputError, match=f"{given} cannot be opened: No such file") as refused:
        covmerge.merge(models / "base", full(models), base_statistics=models / given)
    assert meant in str(refused.value)


def test_a_method_that_does_not_look_at_them(models):
    file = models / "base.covstats.safetensors"
    with pytest.raises(RecipeError, match="'ties' does not look at the base's inputs"):
        covmerge.merge(models / "base", full(models), "ties", base_statistics=file)
    # Beside methods that do, it is for these.
    rows = covmerge.compare(
        models / "base", full(models), ["ties", "auto"], base_statistics=file
    ).rows
    assert [row.method for row in rows] == ["ties", "auto"]
    with pytest.raises(RecipeError, match=r"no method of these looks .* \(ties, ace\).* take auto"):
        covmerge.compare(models / "base", full(models), ["ties", "ace"], base_statistics=file)
    flags = [f"--expert={name}={path}" for name, path in full(models).items()]
    of_base = ["--base", models / "base", "--base-stats", file]
    ran = command("compare", *of_base, *flags, "--methods=ties", code=2)
    assert "'ties' does not look at the base's inputs" in words(ran.stderr)


def test_of_one_expert_no_inputs_of_the_base_are_asked_for(models):
    one = {"e1": models / "e1"}
    file = models / "base.covstats.safetensors"
    with pytest.raises(
        RecipeError, match=r"one expert alone .* Leave out .*\(base_statistics\)\.$"
    ):
        covmerge.merge(models / "base", one, base_statistics=file)
    update = torch.randn(3, 4, generator=torch.manual_seed(0))
    with pytest.raises(covmerge.errors.TensorError, match=r"one expert alone .* leave out"):
        covmerge.merge_layer([update], base_inputs=torch.eye(4))


def test_layers_that_the_file_lacks_are_named(models):
    file, fewer = models / "base.covstats.safetensors", models / "few.covstats.safetensors"
    keep_layers(file, fewer, lambda name: "mlp" not in name)
    out = models / "out"
    result = covmerge.merge(models / "base", full(models), out=out, base_statistics=fewer)
    (note,) = (note for note in result.notes if "has no inputs of" in note)
    assert "6 layers (model.layers.0.mlp." in note and "and 3 more" in note
    manifest = json.loads((out / "covmerge.json").read_text())
    assert note in manifest["notes"]
    rules = {name: entry["rule"] for name, entry in manifest["tensors"].items()}
    assert rules[LAYER] == "auto (no base inputs of it)"
    assert rules["model.layers.0.self_attn.q_proj.weight"] == "auto"
    assert manifest["totals"]["inputs_known"] == 8
    keep_layers(file, fewer, lambda name: "none of them" in name, also="another.weight")
    with pytest.raises(InputError, match=r"names none of the layers .* it names 'another.weight'"):
        covmerge.merge(models / "base", full(models), base_statistics=fewer)


def test_on_the_command_line_and_in_a_recipe(models):
    (models / "recipe.yml").write_text(
        "base: base\nbase_statistics: base.covstats.safetensors\nexperts: {e1: e1, e2: e2}\n"
    )
    by_recipe, by_flags = models / "one", models / "two"
    assert command("merge", models / "recipe.yml", by_recipe).code == 0
    flags = ["--base", models / "base", "--base-stats", models / "base.covstats.safetensors"]
    experts = [f"--expert={name}={path}" for name, path in full(models).items()]
    assert command("merge", *flags, *experts, by_flags).code == 0
    one, two = (path / "model.safetensors" for path in (by_recipe, by_flags))
    assert one.read_bytes() == two.read_bytes()


def test_one_layer_refuses_what_does_not_fit():
    update = LowRank(torch.ones(3, 1), torch.ones(1, 4))
    with pytest.raises(
        covmerge.errors.TensorError, match=r"are \[3, 3\], this layer needs \[4, 4\]"
    ):
        covmerge.merge_layer([update, update], "auto", base_inputs=torch.eye(3))
    with pytest.raises(covmerge.errors.TensorError, match="does not look at the base's inputs"):
        covmerge.merge_layer([update, update], "average", base_inputs=torch.eye(4))
    with pytest.raises(covmerge.errors.TensorError, match="NaN or Inf"):
        covmerge.merge_layer([update, update], "auto", base_inputs=torch.full((4, 4), torch.nan))
