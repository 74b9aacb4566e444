"""Models stacked of layers of others: what lies where, the config, and all that goes with a merge."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import covmerge
from covmerge.errors import InputError, RecipeError
from covmerge.front.api import plan_recipe, run_recipe
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.options import RunOptions
from covmerge.run.recompute import recompute
from covmerge.run.sources import open_recipe
from tests.e2e.models import run, save_family
from tests.forked import fork_workers
from tests.interrupted import InterruptAfter

# Of two models of two layers each: three layers, the middle one a mean.
SLICES = [
    {"experts": {"e1": [0, 1]}},
    {"experts": {"e1": [1, 2], "e2": [0, 1]}},
    {"experts": {"e2": [1, 2]}},
]


def stacked(folder, name="llama", slices=SLICES, **given):
    base, experts = save_family(name, folder, experts=2)
    data = {
        "base": None,
        "experts": {expert: str(path) for expert, path in experts.items()},
        "method": "average",
        "slices": slices,
        **given,
    }
    if data["base"] is True:
        data["base"] = str(base)
    return parse_recipe(data)


def weights(path):
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_lies_where(name, tmp_path):
    recipe = stacked(tmp_path, name)
    result = run_recipe(recipe, tmp_path / "out")
    assert any("3 layers, stacked of slices" in note for note in result.notes)
    found, first, last = (weights(tmp_path / own) for own in ("out", "expert1", "expert2"))
    layer = {"llama": "model.layers.", "gpt2": "transformer.h."}[name]
    inside = {n.removeprefix(f"{layer}0.") for n in first if n.startswith(f"{layer}0.")}
    for rest in inside:
        assert torch.equal(found[f"{layer}0.{rest}"], first[f"{layer}0.{rest}"])
        mean = (first[f"{layer}1.{rest}"].double() + last[f"{layer}0.{rest}"].double()) / 2
        torch.testing.assert_close(found[f"{layer}1.{rest}"].double(), mean, rtol=0, atol=1e-6)
        assert torch.equal(found[f"{layer}2.{rest}"], last[f"{layer}1.{rest}"])
    embedding, *others = {
        "llama": ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"],
        "gpt2": ["transformer.wte.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"],
    }[name]
    assert torch.equal(found[embedding], first[embedding])
    assert all(torch.equal(found[other], last[other]) for other in others)
    assert len(found) == 3 * len(inside) + len([n for n in first if layer not in n])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_loads_it(name, tmp_path):
    run_recipe(stacked(tmp_path, name), tmp_path / "out")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    assert model.config.num_hidden_layers == 3
    assert run(model).isfinite().all()


def test_over_a_base_updates_are_of_the_same_layers(tmp_path):
    slices = [
        {"experts": {"e1": [0, 2], "e2": [0, 2]}},
        {"experts": {"e1": [1, 2]}, "base": [0, 1]},
    ]
    given = {"method": "task_arithmetic", "parameters": {"scale": 1.0}}
    recipe = stacked(tmp_path, base=True, slices=slices, **given)
    with pytest.raises(InputError, match=r"swapped-tensors: expert 'e1': 'model.layers.2"):
        run_recipe(recipe, tmp_path / "out")
    run_recipe(recipe.model_copy(update={"allow": ("swapped-tensors",)}), tmp_path / "out")
    found, base, e1, e2 = (weights(tmp_path / n) for n in ("out", "base", "expert1", "expert2"))
    name = "model.layers.{}.mlp.up_proj.weight"
    sums = e1[name.format(1)] + e2[name.format(1)] - base[name.format(1)]
    torch.testing.assert_close(found[name.format(1)], sums)
    torch.testing.assert_close(found[name.format(2)], e1[name.format(1)])
    checks = covmerge.verify(tmp_path / "out")
    assert checks.ok
    assert [check.made for check in checks.checks if check.name == "copied"] == [True]


def test_depth_and_parameters_are_those_of_the_slice(tmp_path):
    slices = [
        {"experts": {"e1": [0, 2], "e2": [0, 2]}},
        {"experts": {"e1": [0, 2], "e2": [0, 2]}, "parameters": {"scale": {"by_depth": [3, 4]}}},
    ]
    recipe = stacked(
        tmp_path,
        base=True,
        slices=slices,
        method="task_arithmetic",
        parameters={"scale": {"by_depth": [1, 2]}},
    )
    plan, _ = plan_recipe(recipe)
    scales = {t.name: t.operation.parameters["scale"] for t in plan.tensors}
    assert scales["model.embed_tokens.weight"] == 1
    assert [scales[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(4)] == [1, 2, 3, 4]
    assert scales["model.norm.weight"] == 3


def test_verification_resume_workers_and_dry_run(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    recipe = stacked(tmp_path)
    plan, _ = plan_recipe(recipe)
    assert plan.summary()["tensors"] == 3 * 9 + 3
    first = run_recipe(recipe, tmp_path / "out")
    assert first.verification.ok
    verified = covmerge.verify(tmp_path / "out")
    assert verified.ok
    assert "differs" not in {check.name for check in verified.checks}
    run_recipe(recipe, tmp_path / "again", RunOptions(workers=2))
    for name in ("model.safetensors", "config.json", "covmerge.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    manifest = json.loads((tmp_path / "out" / "covmerge.json").read_text())
    assert list(manifest["sources"]) == ["expert e1", "expert e2"]
    # What is recorded makes the same model again.
    run_recipe(parse_recipe(manifest["recipe"]), tmp_path / "third")
    assert (tmp_path / "third" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_verified_by_computing_again(tmp_path):
    run_recipe(stacked(tmp_path), tmp_path / "out")
    assert recompute(tmp_path / "out").ok


def test_a_tensor_that_is_not_what_it_was(tmp_path):
    run_recipe(stacked(tmp_path), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not covmerge.verify(tmp_path / "out").ok


def test_lists_by_layer_in_the_config_follow(tmp_path):
    recipe = stacked(tmp_path)
    for expert in ("expert1", "expert2"):
        path = tmp_path / expert / "config.json"
        config = {**json.loads(path.read_text()), "layer_types": ["full_attention", "sliding"]}
        path.write_text(json.dumps(config))
    run_recipe(recipe, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert config["layer_types"] == ["full_attention", "sliding", "sliding"]


class TestWhatIsRefused:
    def test_a_layer_that_is_not_there(self, tmp_path):
        slices = [{"experts": {"e1": [0, 3]}}, {"experts": {"e2": [0, 1]}}]
        with pytest.raises(InputError, match="has the layers 0 to 1, and a slice asks for layer 2"):
            run_recipe(stacked(tmp_path, slices=slices), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_model_of_two_stacks(self, tmp_path):
        slices = [{"experts": {"e1": [0, 1], "e2": [0, 1]}}]
        with pytest.raises(InputError, match="several stacks of layers"):
            run_recipe(stacked(tmp_path, "t5", slices=slices), tmp_path / "out")

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"slices": [{"experts": {"e3": [0, 1]}}]}, "names 'e3'"),
            ({"slices": [{"experts": {"e1": [0, 1]}}]}, "the expert 'e2' is in no slice"),
            ({"slices": [{"experts": {"e1": [0, 1], "e2": [0, 2]}}]}, r"e1 1, e2 2"),
            ({"slices": [{"experts": {"e1": [1, 1]}}]}, "has no layers"),
            (
                {"slices": [*SLICES, {"experts": {"e1": [0, 10**12]}}]},
                "the slices have 1000000000003 layers together",
            ),
            ({"slices": [{"experts": {"e1": [0, 1]}, "base": [0, 1]}]}, "the recipe has no base"),
            ({"output": {"format": "adapter"}}, "'slices' make a model of its own"),
        ],
    )
    def test_slices_that_do_not_fit(self, given, said):
        data = {"base": None, "experts": {"e1": "a", "e2": "b"}, "slices": SLICES, **given}
        with pytest.raises(RecipeError, match=said):
            parse_recipe(data)


def test_a_mean_without_a_base(tmp_path):
    recipe = stacked(tmp_path, slices=[])
    result = run_recipe(recipe, None).tensors
    over = covmerge.merge(
        tmp_path / "base", [tmp_path / "expert1", tmp_path / "expert2"], "average"
    ).tensors
    assert all(torch.allclose(result[name], over[name], atol=1e-6) for name in over)


def test_without_a_base_every_tensor_is_read_once(tmp_path, monkeypatch):
    recipe = stacked(tmp_path, slices=[])
    plan, _ = plan_recipe(recipe)
    stored = sum(tensor.stored.nbytes for tensor in plan.tensors)
    assert plan.read_bytes == len(recipe.experts) * stored
    read, rows_of = [], Sources.read

    def counted(sources, operand, rows):
        found = rows_of(sources, operand, rows)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(Sources, "read", counted)
    run_recipe(recipe, None)
    assert sum(read) == plan.read_bytes


def test_without_a_base_no_update_is_lost_to_rounding(tmp_path):
    # Nearly the first model, which is no base: hardly anything but the rounding is away from it.
    recipe = stacked(
        tmp_path,
        slices=[],
        method="linear",
        parameters={"weight": [1.0, 1e-7]},
        output={"dtype": "bfloat16"},
    )
    result = run_recipe(recipe, tmp_path / "out")
    (rounding,) = (c for c in result.verification.checks if c.name == "rounding")
    assert rounding.ok and not rounding.made
    assert "merged update's norm" not in (tmp_path / "out" / "README.md").read_text()


def test_inspection_needs_a_base(tmp_path):
    job = covmerge.run.comparison.CompareJob(recipe=stacked(tmp_path), methods=["average"])
    with (
        pytest.raises(InputError, match="the recipe has no base"),
        open_recipe(job.recipe) as opened,
    ):
        job.run(opened)


def test_a_stack_is_resumed(tmp_path):
    recipe = stacked(tmp_path)
    run_recipe(recipe, tmp_path / "undisturbed")

    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, tmp_path / "out", RunOptions(progress=InterruptAfter(6)))
    assert not (tmp_path / "out").exists()
    resumed = run_recipe(recipe, tmp_path / "out", RunOptions(resume=True))
    assert resumed.run["resumed_items"] > 0
    for name in ("model.safetensors", "config.json"):
        first, again = (tmp_path / own / name for own in ("undisturbed", "out"))
        assert first.read_bytes() == again.read_bytes()
