"""Singular value calibration: what experts share, what only one has, and what nobody can tell."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, Merged, Rounding
from covmerge.maths.testing.groups import random_rotation, random_updates, relative
from covmerge.maths.testing.subject import Subject

UPDATES = random_updates(12, 8, count=3, rank=8, spread=3.0, seed=0)


def calibrated(updates, merged, rounding=(), **given):
    group = LinearGroup(tuple(updates), (1.0,) * len(updates), rounding=tuple(rounding))
    step = covmerge.steps.get("svc")
    return step.finish(group, Merged(merged), step.resolve(given)).delta


def apart():
    """Two experts of unlike rows and columns, so that every direction is one's own."""
    a, b = torch.zeros(2, 10, 16, dtype=torch.float64)
    a[:5, :8], b[5:, 8:] = random_updates(5, 8, count=2, rank=5, spread=1.0, seed=4)
    return a, b


def test_what_all_have_counts_once():
    update = UPDATES[0]
    assert relative(calibrated([update] * 3, 3 * update, alpha=1.0), update) < 1e-12
    assert relative(calibrated([update] * 3, update), update) < 1e-12


def test_an_expert_without_a_part_in_a_direction_counts_alpha():
    a, b = apart()
    # Of the mean, s = 1/2 for the expert whose direction it is: σ · 2 / (1/2 + α).
    assert relative(calibrated([a, b], (a + b) / 2, alpha=0.1), (a + b) / 0.6) < 1e-12


def test_what_rounding_of_the_stored_weights_left_is_no_part():
    """Two experts of one entry each, in weights that were rounded."""
    d_out, d_in, unit = 40, 400, 1e-4
    exact = torch.zeros(2, d_out, d_in, dtype=torch.float64)
    exact[0, 0, 0], exact[1, 1, 1] = 0.3, 0.5
    generator = torch.Generator().manual_seed(1)
    noise = unit * torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    known = Rounding(edge=unit * (d_out**0.5 + d_in**0.5), energy=unit**2 * d_out * d_in)
    stored = exact + noise
    told = calibrated(stored, stored.mean(0), [known] * 2)
    assert relative(told[:2, :2], exact.sum(0)[:2, :2] / 0.6) < 0.01
    # Not told of it, rounding is divided by its square.
    assert relative(calibrated(stored, stored.mean(0))[:2, :2], told[:2, :2]) > 0.2


def test_equal_singular_values_are_calibrated_as_one():
    group = LinearGroup(tuple(UPDATES), (1.0,) * 3)
    flat = Subject("iso_c", after=["svc"])
    left, right = random_rotation(12, 1), random_rotation(8, 2)
    turned = replace(group, updates=tuple(left @ update @ right.T for update in UPDATES))
    assert relative(flat.merge(turned), left @ flat.merge(group) @ right.T) < 1e-9
    plain = Subject("iso_c").merge(group)
    share = float((flat.merge(group) * plain).sum() / plain.square().sum())
    assert relative(flat.merge(group), share * plain) < 1e-9


def test_no_direction_grows_beyond_one_over_alpha():
    opposite = [UPDATES[0], -UPDATES[0] * (1 + 1e-9)]
    merged = sum(opposite) / 2
    made = calibrated(opposite, merged, alpha=0.2)
    assert 0 < made.norm() <= 5.001 * merged.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_that_cancel_give_the_base(dtype):
    update = UPDATES[0].to(dtype)
    assert not covmerge.merge_layer([update, -update], "average", after=["svc"]).any()


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1)])
def test_a_single_row_or_column(shape):
    updates = random_updates(*shape, count=2, rank=1, spread=2.0, seed=1)
    made = covmerge.merge_layer(updates, "average", after=["svc"])
    assert torch.isfinite(made).all() and made.any()
