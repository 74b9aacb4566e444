"""Methods that see the models' weights, and parameters of one value per expert: the plumbing of both."""

from typing import Annotated

import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.base.types import LinearGroup
from covmerge.errors import RecipeError, TensorError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.maths.methods import slerp as slerp_module
from covmerge.plan.planning.build import build_plans
from covmerge.plan.recipe import parse_recipe
from covmerge.registry import PerExpert
from tests.advised import advice

# Rows that several items hold, a vector, a scalar, and nothing at all.
BASES = {"tensors": {"missing": "base"}}
SHAPES = {"fc.weight": (3000, 1000), "norm.weight": (7,), "scale": (), "none": (0, 5)}


@pytest.fixture
def picked():
    """A method that gives the weights of one expert as they are."""

    @covmerge.register("picked", sees="weights", unit="element")
    def picked(group, *, which: int = 0):
        assert not group.updates and group.base is not None
        return group.models[which]

    yield "picked"
    covmerge.methods.registry.unregister("picked")


@pytest.fixture
def mixed():
    """Σ share_t W_t, with a share for each expert."""

    @covmerge.register("mixed", sees="weights", unit="element")
    def mixed(
        group,
        *,
        share: Annotated[float | list[float], PerExpert(), Field(description="of an expert")] = 1.0,
    ):
        assert isinstance(share, float) or len(share) == len(group.models)
        shares = share if isinstance(share, list) else [share] * len(group.models)
        return sum(s * model for s, model in zip(shares, group.models, strict=True))

    yield "mixed"
    covmerge.methods.registry.unregister("mixed")


def models(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    base = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    return base, [
        {
            n: (w + 0.3 * torch.randn(w.shape, generator=generator).to(dtype)).to(dtype)
            for n, w in base.items()
        }
        for _ in range(2)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weights_come_through_bit_for_bit(picked, dtype, tmp_path):
    """W_0 + (W_t − W_0) is not W_t."""
    base, experts = models(dtype)
    experts[1]["fc.weight"] = experts[1]["fc.weight"] / 3 - 1  # the difference is rounded
    again = base["fc.weight"].float() + (experts[1]["fc.weight"] - base["fc.weight"]).float()
    assert dtype != torch.float32 or not torch.equal(again, experts[1]["fc.weight"])
    for number, expert in enumerate(experts):
        save_file(expert, tmp_path / f"{number}.safetensors")
    save_file(base, tmp_path / "base.safetensors")
    files = {str(n): tmp_path / f"{n}.safetensors" for n in range(2)}
    covmerge.merge(
        tmp_path / "base.safetensors",
        files,
        picked,
        tmp_path / "out",
        which=1,
        allow=("not-a-fine-tune",),
    )
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(merged[name], weight) for name, weight in experts[1].items())


def test_an_expert_that_lacks_a_tensor_has_the_bases(picked):
    base, experts = models()
    del experts[1]["norm.weight"]
    merged = covmerge.merge(base=base, experts=experts, method=picked, which=1, **BASES).tensors
    assert torch.equal(merged["norm.weight"], base["norm.weight"])
    assert torch.equal(merged["fc.weight"], experts[1]["fc.weight"])


def test_merge_layer_gives_the_update(picked):
    base, update = torch.randn(3, 4), torch.randn(3, 4)
    given = covmerge.merge_layer([update], picked, base=base)
    assert torch.equal(given, (base + update) - base)
    with pytest.raises(TensorError, match="needs the base's weights"):
        covmerge.merge_layer([update], picked)


def test_steps_are_refused(picked):
    base, experts = models()
    with pytest.raises(RecipeError, match="sees the models' weights, and steps change updates"):
        covmerge.merge(base=base, experts=experts, method=picked, after=["rescale"])


def test_a_value_for_each_expert(mixed):
    base, experts = models()
    merged = covmerge.merge(base=base, experts=experts, method=mixed, share=[0.25, 0.5]).tensors
    expected = 0.25 * experts[0]["norm.weight"] + 0.5 * experts[1]["norm.weight"]
    assert torch.equal(merged["norm.weight"], expected)
    one = covmerge.merge_layer(
        [torch.ones(2), torch.zeros(2)], mixed, base=torch.ones(2), share=[3.0, 1.0]
    )
    assert one.tolist() == [6.0, 6.0]


def test_values_go_with_the_experts_that_have_a_tensor(mixed):
    base, experts = models()
    del experts[0]["norm.weight"]
    merged = covmerge.merge(
        base=base, experts=experts, method=mixed, share=[0.25, 0.5], tensors={"missing": "present"}
    ).tensors
    assert torch.equal(merged["norm.weight"], 0.5 * experts[1]["norm.weight"])


def test_another_number_of_values_names_both(mixed):
    base, experts = models()
    told = r"share = \[0.25\] has 1 values, and there are 2 experts \(\w+, \w+\)"
    with pytest.raises(RecipeError, match=told):
        covmerge.merge(base=base, experts=experts, method=mixed, share=[0.25])
    with pytest.raises(RecipeError, match=r"there are 1 experts \(update 0\)"):
        covmerge.merge_layer([torch.ones(2)], mixed, base=torch.ones(2), share=[0.25, 0.5])


def test_a_number_of_experts_that_it_does_not_merge():
    @covmerge.register("two", sees="weights", unit="element", experts=(2, 2))
    def two(group):
        return group.models[0]

    base, experts = models()
    try:
        with pytest.raises(RecipeError, match=r"'two' merges 2 experts beside the base, .* has 1 "):
            covmerge.merge(base=base, experts=experts[:1], method="two")
        with pytest.raises(TensorError, match="'two' merges 2 experts beside the base"):
            covmerge.merge_layer([torch.ones(2)], "two", base=torch.ones(2))
        del experts[1]["norm.weight"]
        present = {"missing": "present"}
        merged = covmerge.merge(base=base, experts=experts, method="two", tensors=present).tensors
        assert torch.equal(merged["norm.weight"], base["norm.weight"])
    finally:
        covmerge.methods.registry.unregister("two")


def test_what_it_holds_is_in_the_plan(picked, tmp_path):
    base, experts = models()
    for name, tensors in (("base", base), ("a", experts[0]), ("b", experts[1])):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    opened = {n: open_checkpoint(tmp_path / f"{n}.safetensors") for n in ("base", "a", "b")}

    def item(method):
        recipe = parse_recipe(
            {
                "method": method,
                "base": str(tmp_path / "base.safetensors"),
                "experts": {n: str(tmp_path / f"{n}.safetensors") for n in "ab"},
            },
            origin="here",
        )
        return build_plans([recipe], opened["base"], {n: opened[n] for n in "ab"})[0].items[0]

    by_weights, by_updates = item(picked), item("average")
    assert by_weights.rows == by_updates.rows
    part = by_weights.at_once * 1000 * 4
    # Two models, the base, W̄ and W̄ − W_0.
    assert by_weights.workspace >= 5 * part


def test_it_takes_tensors_as_they_are_stored():
    with pytest.raises(ValueError, match="sees weights: it takes tensors as they are stored"):
        covmerge.register("wrong", sees="weights")(lambda group: group.models[0])
    group = LinearGroup((), (1.0,), base=torch.zeros(2), models=(torch.ones(2),))
    assert group.tensors is group.models and group.shape == (2,)


def test_gram_matrices_belong_to_oriented_matrices():
    said = advice("needs Gram matrices, which belong to oriented matrices: leave out `unit`")
    with pytest.raises(ValueError, match=said):
        covmerge.register("wrong", data="gram", unit="element")(lambda group: group.updates[0])
    covmerge.register("right", data="gram")(lambda group: group.updates[0])
    covmerge.methods.registry.unregister("right")


def numbers(*shape, count=2):
    generator = torch.Generator().manual_seed(0)
    base, *models = torch.randn(count + 1, *shape, generator=generator)
    return LinearGroup((), (1.0,) * count, base=base, models=tuple(models))


def merged(name, group, **parameters):
    method = covmerge.methods.get(name)
    return method(group, **method.resolve(parameters)).weights


def test_scalars_have_a_mean():
    group = numbers()
    assert torch.allclose(merged("linear", group), sum(group.models) / 2)


def test_passthrough_rounds_to_the_arithmetic_that_is_asked_for():
    group = numbers(5, count=1)
    rounded = group.models[0].bfloat16().float()
    assert torch.equal(merged("passthrough", group, arithmetic="bfloat16"), rounded)


def test_the_angle_of_slerp_is_that_of_all_parts(monkeypatch):
    group = numbers(3, 7, count=1)
    whole = merged("slerp", group)
    monkeypatch.setattr(slerp_module, "_PART", 4)
    assert torch.allclose(merged("slerp", group), whole)


@pytest.mark.parametrize("ends", [[1, 3, 8], [4, 8, 12, 16, 20], [16], [8, 9], [20]])
def test_the_angle_of_slerp_is_the_same_wherever_its_pieces_end(ends, monkeypatch):
    group = numbers(21, count=1)
    monkeypatch.setattr(slerp_module, "_PART", 4)

    def pieces(experts=None):
        assert group.base is not None
        for start, end in zip([0, *ends], [*ends, 21], strict=True):
            models = tuple(model[start:end] for model in group.models)
            yield LinearGroup((), group.weights, models=models, base=group.base[start:end])

    found = covmerge.methods.get("slerp").tensor_pass.of(
        pieces, (21,), {"t": 0.3, "arithmetic": None}
    )
    rows = LinearGroup(
        (), group.weights, models=group.models, base=group.base, known=(found.found,)
    )
    assert torch.equal(merged("slerp", rows, t=0.3), merged("slerp", group, t=0.3))
