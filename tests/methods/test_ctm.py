"""Compress-then-Merge: its rank, what it equals, and whom its bases see."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, LowRank
from tests.methods.groups import random_updates, relative

UPDATES = random_updates(24, 40, 3, 4, 3.0, seed=0)


def merge(updates, **parameters):
    return covmerge.merge_layer(updates, "ctm", **parameters)


@pytest.mark.parametrize("rank", [1, 3, 7])
@pytest.mark.parametrize("inner", ["ties", "average", "tsv_m", "iso_c", "cart"])
def test_the_result_is_an_adapter_of_the_rank(rank, inner):
    merged = merge(UPDATES, core_rank=rank, inner=inner)
    assert int(torch.linalg.matrix_rank(merged, rtol=1e-9)) <= rank
    assert merged.norm() > 0


def test_bases_of_all_directions_change_nothing():
    for inner in ("task_arithmetic", "iso_c", "tsv_m"):
        given = {} if inner == "task_arithmetic" else {"rank_rtol": 1e-9}
        small = {"scale": 1.0} if inner == "task_arithmetic" else {}
        # TSV-Merge's share goes by the sides of the space: here both have all 12 directions.
        expected = covmerge.merge_layer(
            UPDATES, "core_space", inner=inner, isotropize=False, **given
        )
        assert relative(merge(UPDATES, inner=inner, **given, **small), expected) < 1e-9


def test_one_expert_is_truncated_to_the_rank():
    (update,) = random_updates(20, 30, 1, 20, 1.0, seed=3)
    left, sigma, right = torch.linalg.svd(update, full_matrices=False)
    truncated = (left[:, :5] * sigma[:5]) @ right[:5]
    assert relative(merge([update], inner="average", core_rank=5), truncated) < 1e-10


def test_a_short_update_has_its_part_in_the_bases():
    """Without balance the bases hold the long update alone, and nothing of the short one is left."""
    first, second = (each / each.norm() for each in random_updates(15, 20, 2, 2, 1.0, seed=5))
    updates = [torch.block_diag(first, 0 * second), 1e-2 * torch.block_diag(0 * first, second)]
    for strength, seen in ((0.0, False), (1.0, True)):
        merged = merge(updates, core_rank=2, strength=strength, inner="task_arithmetic", scale=1.0)
        kept = merged[15:, 20:].norm() / 1e-2
        assert kept > 0.3 if seen else kept < 1e-6


def test_bases_are_those_of_the_step():
    """Of updates that the step has balanced, CtM without a balance of its own has the same bases."""
    group = LinearGroup(tuple(UPDATES), (1.0,) * 3)
    (step,) = covmerge.steps.resolve_steps([{"norm_balance": {"strength": 0.6}}], "before")
    balanced = step.step.prepare(group, step.parameters).updates
    ratios = [float(b.norm() / u.norm()) for b, u in zip(balanced, UPDATES, strict=True)]
    # The sum of cores is linear in them, so weights undo what the step did to lengths.
    expected = covmerge.merge_layer(
        list(balanced),
        "ctm",
        weights=[1 / ratio for ratio in ratios],
        core_rank=4,
        strength=0.0,
        inner="task_arithmetic",
    )
    found = merge(UPDATES, core_rank=4, strength=0.6, inner="task_arithmetic")
    assert relative(found, expected) < 1e-9


def test_it_says_what_the_bases_hold():
    method = covmerge.methods.get("ctm")
    group = LinearGroup((*UPDATES, torch.zeros_like(UPDATES[0])), (1.0,) * 4)
    diagnostics = method(group, **method.resolve({"core_rank": 3})).stats
    assert diagnostics["core"] == (3, 3)
    assert diagnostics["unchanged"] == 1
    assert 0.3 < diagnostics["share_held"] < 0.9
    assert diagnostics["rounds"] >= 3
    whole = method(replace(group), **method.resolve({})).stats
    assert whole["core"] == (12, 12)
    assert whole["share_held"] == pytest.approx(1.0)


def test_factors_give_an_adapter_that_is_no_larger_than_the_rank():
    generator = torch.Generator().manual_seed(1)
    factors = [
        LowRank(
            torch.randn(30, 4, generator=generator, dtype=torch.float64),
            torch.randn(4, 20, generator=generator, dtype=torch.float64),
        )
        for _ in range(3)
    ]
    merged = merge(factors, core_rank=5)
    dense = merge([each.dense() for each in factors], core_rank=5)
    assert relative(merged.dense(), dense) < 1e-10
    assert int(torch.linalg.matrix_rank(merged.dense(), rtol=1e-9)) <= 5
