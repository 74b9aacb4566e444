"""Pico: shares of directions, whatever an adapter's factors are."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, LowRank
from covmerge.maths.methods.factored import merge_factors
from covmerge.maths.testing.groups import random_updates, relative
from covmerge.methods import get
from covmerge.steps import resolve_steps, with_steps

UPDATES = random_updates(12, 8, count=3, rank=8, spread=9.0, seed=0)


def prepared(group, **given):
    step = covmerge.steps.get("pico")
    return step.prepare(group, step.resolve(given))


def of(updates):
    return LinearGroup(tuple(updates), (1.0,) * len(updates))


def adapters(scale=1.0):
    generator = torch.Generator().manual_seed(5)
    made = []
    for t in range(3):
        left = torch.randn(20, 3, generator=generator, dtype=torch.float64) * (t + 1)
        right = torch.randn(3, 16, generator=generator, dtype=torch.float64)
        size = scale if t == 0 else 1.0
        made.append(LowRank(left * size, right / size))
    return made


def test_shares_of_single_directions():
    a, b = torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 1.0]))
    found = prepared(of([a, b])).updates
    assert found[0][0, 0] == pytest.approx(3 / (1 + 0.75))  # c = σ / Σσ of balanced factors
    assert found[1][1, 1] == pytest.approx(1 / (1 + 0.25))


def test_a_direction_that_holds_all_is_divided_by_the_experts():
    row = torch.randn(1, 9, generator=torch.Generator().manual_seed(0))
    group = of([row, 2 * row, -row])
    for made, update in zip(prepared(group).updates, group.updates, strict=True):
        assert relative(made, update.double() / 3) < 1e-6


def test_one_expert_alone_stays_as_it_is():
    zero = torch.zeros_like(UPDATES[0])
    group = of([UPDATES[0], zero])
    assert prepared(group).updates is group.updates
    three = prepared(of([*UPDATES, zero])).updates
    for made, expected in zip(three, prepared(of(UPDATES)).updates, strict=False):
        assert torch.equal(made, expected)


def test_balanced_factors_do_not_depend_on_how_an_adapter_is_split():
    plain, split = adapters(), adapters(scale=10.0)
    merged = [covmerge.merge_layer(one, "average", before=["pico"]) for one in (plain, split)]
    assert isinstance(merged[0], LowRank)
    assert relative(merged[1].dense(), merged[0].dense()) < 1e-10
    given = [{"pico": {"factors": "given"}}]
    merged = [covmerge.merge_layer(one, "average", before=given) for one in (plain, split)]
    assert relative(merged[1].dense(), merged[0].dense()) > 0.05


@pytest.mark.parametrize("factors", ["balanced", "given"])
@pytest.mark.parametrize("method", ["average", "ace", "tsv_m", "core_space"])
def test_on_factors_as_multiplied_out(factors, method):
    updates = adapters()
    (use,) = resolve_steps([{"pico": {"factors": factors}}], "before")
    whole = with_steps(get(method), [use], [])
    given = get(method).resolve({"rank_rtol": 1e-6} if get(method).has("rank_rtol") else {})
    thin = merge_factors(whole, updates, [1.0] * 3, given).delta
    full = replace(of([one.dense() for one in updates]), factors=tuple(updates))
    assert relative(thin.dense(), whole(full, **given).delta) < 1e-8


def test_the_factors_follow_their_updates():
    updates = adapters()
    group = replace(of([one.dense() for one in updates]), factors=tuple(updates))
    made = prepared(group)
    for update, own in zip(made.updates, made.factors, strict=True):
        assert relative(own.dense(), update) < 1e-12


def test_with_rescale_the_mean_keeps_the_mean_norm():
    merged = covmerge.merge_layer(UPDATES, "average", before=["pico"], after=["rescale"])
    mean = sum(float(update.norm()) for update in UPDATES) / 3
    assert float(merged.norm()) == pytest.approx(mean, rel=1e-12)


def test_adapters_keep_their_factors_where_the_method_multiplies_them_out():
    generator = torch.Generator().manual_seed(0)
    adapters = [
        LowRank(
            moved * torch.randn(32, 2, generator=generator),
            torch.randn(2, 24, generator=generator) / moved,
        )
        for moved in (5.0, 1.0, 0.2)
    ]
    given, balanced = (
        covmerge.merge_layer(adapters, "ties", before=[{"pico": {"factors": factors}}])
        for factors in ("given", "balanced")
    )
    assert (given - balanced).norm() > 0.05 * balanced.norm()
