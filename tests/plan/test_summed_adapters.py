"""A mean of many adapters takes one product a block, however many they are."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.base.types import LinearGroup, LowRank
from covmerge.errors import InputError
from covmerge.maths.methods import registry
from tests.plan.test_plan import plan_for

COUNT, RANK, SHAPE = 40, 2, (128, 8192)  # as many numbers as a block has
LAYER = "model.layers.0.self_attn.q_proj"


def write(folder, number, stem=LAYER):
    """An adapter of one layer, and its update in float64."""
    generator = torch.Generator().manual_seed(number)
    a = torch.randn(RANK, SHAPE[1], generator=generator)
    b = torch.randn(SHAPE[0], RANK, generator=generator)
    path = folder / f"e{number}"
    path.mkdir()
    parts = {
        f"base_model.model.{stem}.lora_A.weight": a,
        f"base_model.model.{stem}.lora_B.weight": b,
    }
    save_file(parts, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3 * RANK, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path, 3 * b.double() @ a.double()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A base of one matrix, adapters of it, and their updates in float64."""
    drawn = torch.randn(SHAPE, generator=torch.Generator().manual_seed(99))
    folder = tmp_path_factory.mktemp("many")
    written = [write(folder, number) for number in range(COUNT)]
    experts = {path.name: path for path, _ in written}
    return {f"{LAYER}.weight": drawn}, experts, [update for _, update in written]


@pytest.mark.parametrize(
    ("method", "given", "factor"),
    [("average", {}, 1 / (COUNT + 1)), ("task_arithmetic", {"scale": 0.5}, 0.5)],
    ids=["average", "task_arithmetic"],
)
def test_the_sum_of_factors_is_that_of_the_updates(sources, method, given, factor):
    base, experts, updates = sources
    name = f"{LAYER}.weight"
    merged = covmerge.merge(base, experts, method, weights={"e0": 2.0}, **given)
    wanted = base[name].double() + factor * (updates[0] + sum(updates))
    error = torch.linalg.norm(merged.tensors[name].double() - wanted)
    assert error <= 1e-6 * torch.linalg.norm(wanted)


def test_blocks_of_a_sum_are_as_long_whatever_the_number_of_adapters(sources):
    base, experts, _ = sources
    assert len(plan_for(base, experts, method="average").items) == 1
    # One that looks at single elements of each has them all alive.
    assert len(plan_for(base, experts, method="ties").items) > 1


def test_adapters_of_other_layers_and_what_overflows(tmp_path):
    other = "model.layers.1.self_attn.q_proj"
    base = {f"{stem}.weight": torch.zeros(SHAPE) for stem in (LAYER, other)}
    written = [write(tmp_path, 1), write(tmp_path, 2, other)]
    experts = {path.name: path for path, _ in written}
    for dtype in ("float32", "float64"):
        merged = covmerge.merge(base, experts, "average", dtype=dtype).tensors
        for stem, (_, update) in zip((LAYER, other), written, strict=True):
            found = merged[f"{stem}.weight"].double()
            assert torch.linalg.norm(found - update / 2) <= 1e-6 * torch.linalg.norm(update)
    with pytest.raises(InputError, match="gives NaN or Inf on finite updates of norms"):
        covmerge.merge(base, experts, "task_arithmetic", scale=1e38)


def test_a_number_goes_where_it_is_not_lost():
    small, large = torch.full((2, 1), 1e-25), torch.full((1, 3), 1e25)
    for update in (LowRank(small, large), LowRank(large.mT, small.mT)):
        assert torch.all(update.times(1e-25).dense() > 0)
        torch.testing.assert_close(update.times(-2.0).dense(), -2.0 * update.dense())


@pytest.mark.parametrize(
    "declared",
    [
        {"global_pass": registry.get("ties").global_pass},
        {"base_norm": True},
        {"writes_masks": True},
        {"data": "fisher"},
    ],
    ids=lambda declared: next(iter(declared)),
)
def test_what_needs_more_than_the_updates_is_not_summed(declared):
    average = registry.get("average")
    assert average.is_linear_for({}) and not replace(average, **declared).is_linear_for({})


def test_linear_methods_are_those_whose_equation_is_a_sum():
    linear = {
        n for n in registry.names() if registry.get(n).is_linear_for(registry.get(n).resolve({}))
    }
    assert linear == {"average", "task_arithmetic"}
    updates = tuple(torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    weights = (1.0, 0.5, 2.0)
    for name in sorted(linear):
        method = registry.get(name)
        given = method.resolve({})
        merged = method(LinearGroup(updates, weights), **given).delta
        coefficients = method.coefficients_for(weights, given)
        torch.testing.assert_close(
            merged, sum(c * u for c, u in zip(coefficients, updates, strict=True))
        )
