"""What `auto` promises beyond the laws of all methods."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import covmerge
from covmerge import LowRank
from covmerge.base.diagnostics import TensorDiagnostics, summarise
from covmerge.base.types import LinearGroup
from covmerge.maths.methods.factored import merge_factors
from covmerge.maths.reference import REFERENCES
from covmerge.maths.testing.groups import random_updates
from covmerge.methods import registry
from tests.report.merges import report
from tests.tolerance import relative_error

AUTO = registry.get("auto")
SHAPES = [(24, 40), (40, 24), (32, 32), (4, 80)]


def group_of(updates, weights=None):
    return LinearGroup(tuple(updates), tuple(weights or [1.0] * len(updates)))


def merged(updates, weights=None):
    return AUTO(group_of(updates, weights)).delta


@settings(max_examples=50)
@given(
    shape=st.sampled_from(SHAPES),
    count=st.integers(1, 5),
    spread=st.sampled_from([1.0, 30.0]),
    low=st.sampled_from([0, 2, 5]),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_kernel_and_reference_agree(shape, count, spread, low, weighted, seed):
    """None, two or all of the experts are of low rank."""
    few = random_updates(*shape, count, 3, spread, seed=seed)
    updates = few[:low] + random_updates(*shape, count, min(shape), spread, seed=seed)[low:]
    group = group_of(updates, [1.0 + t for t in range(count)] if weighted else None)
    assert relative_error(AUTO(group).delta, REFERENCES["auto"](group)) < 1e-9


@pytest.mark.parametrize("shape", [(24, 40), (256, 320)], ids=str)
def test_float32_solves_it(shape):
    """The ridge bounds the condition number, whatever the updates are."""
    updates = random_updates(*shape, 3, min(shape), 100.0, seed=1)
    updates[0] += 100.0 * torch.outer(updates[1][:, 0], updates[1][0])  # one direction above all
    found = merged([update.float() for update in updates])
    assert relative_error(found.double(), merged(updates)) < 1e-4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factors_and_product_agree(shape):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    factors = [LowRank(draw(shape[0], rank), draw(rank, shape[1])) for rank in (2, 12, 3)]
    found = merge_factors(AUTO, factors, [1.0] * 3, {}).delta.dense()
    assert relative_error(found, merged([f.dense() for f in factors])) < 1e-7


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.5, 1.0, 2.0]])
def test_one_expert_and_copies_of_it_come_back(weights):
    (update,) = random_updates(24, 40, 1, 24, 1.0, seed=3)
    for count in (1, 2, 5):
        given_weights = None if weights is None else weights[:count]
        assert relative_error(merged([update] * count, given_weights), update) < 1e-8


def test_how_many_unlike_experts_there_are_in_float32():
    """Copies are one to the last digit, and lengths far apart lose nothing."""
    (update,) = random_updates(60, 80, 1, 60, 1.0, seed=3)
    assert AUTO(group_of([update.float()] * 5)).diagnostics.unlike_experts == pytest.approx(
        1, abs=1e-12
    )
    updates = random_updates(60, 80, 9, 60, 1e30, seed=6)
    sizes = torch.stack([own.norm() for own in updates])
    flat = torch.stack([(own / own.norm()).flatten() for own in updates])
    expected = sizes.sum() ** 2 / (sizes @ (flat @ flat.mT).square() @ sizes)
    found = AUTO(group_of([own.float() for own in updates])).stats["unlike_experts"]
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 1.0, 8.0), (2.0, 0.3, 0.1)])
def test_an_update_that_vanishes_leaves_without_a_jump_whatever_it_weighs(weights):
    one, two, three = random_updates(24, 40, 3, 24, 1.0, seed=4)
    without = merged([one, two], weights[:2])
    apart = [
        relative_error(merged([one, two, 10.0**-power * three], weights), without)
        for power in range(1, 7)
    ]
    assert all(later < earlier for earlier, later in pairwise(apart)) and apart[-1] < 1e-4
    alone = [
        relative_error(merged([one, 10.0**-power * three], weights[1:]), one) for power in (3, 6)
    ]
    assert alone[1] < 1e-4 and alone[0] < 0.1


def test_a_small_change_of_an_update_changes_little():
    """New directions are faint at first, so a low-rank update becomes one of full rank smoothly."""
    updates = random_updates(24, 40, 3, 4, 3.0, seed=5)
    noise = torch.randn(24, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = merged(updates)
    apart = []
    for power in (3, 4, 5, 6, 7):
        moved = [updates[0] + 10.0**-power * updates[0].norm() * noise / noise.norm(), *updates[1:]]
        apart.append(relative_error(merged(moved), whole))
    assert all(later < 0.5 * earlier for earlier, later in pairwise(apart)) and apart[-1] < 1e-3


def test_experts_without_a_common_direction_keep_what_they_need():
    """Two that use different inputs and outputs: the sum is right for both, and is nearly what comes."""
    one, two = torch.zeros(2, 32, 32, dtype=torch.float64)
    one[:16, :16] = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0]
    two[16:, 16:] = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0]
    assert relative_error(merged([one, two]), one + two) < 1e-3


def test_experts_that_are_alike_are_not_added_up():
    """Eight with cosines of 0.5, and eight copies beside one other: the merge is about as long as one."""
    common, *own = random_updates(48, 64, 9, 48, 1.0, seed=10)
    alike = [(common + each) / 2**0.5 for each in own]
    whole = merged(alike)
    for update in alike:
        assert float((whole * update).sum() / update.square().sum()) == pytest.approx(1.0, abs=0.1)
    beside = merged([own[0]] + [common] * 8)
    assert float((beside * common).sum() / common.square().sum()) == pytest.approx(1.0, abs=0.1)


def test_a_weight_near_0_leaves_an_expert_out():
    one, two, three = random_updates(24, 40, 3, 24, 1.0, seed=4)
    without, faint = merged([one, two]), merged([one, two, three], [1.0, 1.0, 1e-30])
    assert relative_error(faint, without) < 1e-12


def test_what_the_page_says_of_half_precision():
    """A small change of one update decides whether the others' faint directions are rounding."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    base = (0.02 * draw(96, 128)).bfloat16().float()
    low = [4e-4 * draw(96, 3) @ draw(3, 128) for _ in range(3)]
    noise = draw(96, 128)
    found = []
    for size in (3e-5, 4e-5):
        weights = [base + low[0] + size * noise, base + low[1], base + low[2]]
        updates = [each.bfloat16().float() - base for each in weights]
        whole = covmerge.merge_layer(updates, "auto", stored=torch.bfloat16, base=base)
        found.append((updates[0], whole))
    (before, one), (after, other) = found
    assert relative_error(after, before) < 0.05 and relative_error(other, one) > 0.3


def test_updates_that_cancel():
    (update,) = random_updates(24, 40, 1, 24, 1.0, seed=7)
    found = AUTO(group_of([update, -update]))
    assert float(found.delta.norm()) < 1e-9 * float(update.norm())
    assert found.stats["flat_share"] == 0.0
    nothing = AUTO(group_of([0 * update, 0 * update]))
    assert not nothing.delta.any() and nothing.stats == {"unchanged": 2}


def test_unlike_updates_whose_sum_cancels_make_no_jump():
    """F fades with the sum, and h stays, as three updates of sum 0 are not alike."""
    one, two, moved = (1000 * u / u.norm() for u in random_updates(24, 40, 3, 24, 1.0, seed=7))
    one, two = one.round(), two.round()  # so that their sum is exact
    found = AUTO(group_of([one, two, -one - two]))
    near = [merged([one, two, 10.0**-power * moved - one - two]) for power in (6, 9)]
    assert (
        relative_error(near[0], found.delta) < 1e-4 and relative_error(near[1], found.delta) < 1e-7
    )
    assert relative_error(REFERENCES["auto"](group_of([one, two, -one - two])), found.delta) < 1e-9
    assert found.stats["flat_share"] == pytest.approx(
        0.5 * (1 - found.diagnostics.unlike_experts**-2)
    )
    assert found.stats["flat_share"] > 0.2 and "agreement" not in found.stats
    low = [u / u.norm() for u in random_updates(24, 40, 3, 2, 1.0, seed=7)]
    beside = [low[0], low[1], 1e-6 * low[2] - low[0] - low[1]]
    assert AUTO(group_of(beside)).diagnostics.length_share > 0.99


def _low(rank, count, shape=(64, 80), seed=11):
    return random_updates(*shape, count, rank, 1.0, seed=seed)


def test_a_sum_of_few_directions_is_half_way_between_its_own_length_and_one_experts():
    """Orthogonal updates of rank 1 and equal length: one is N^(−½) of the sum, and e is N of 64."""
    left = torch.linalg.qr(torch.randn(64, 4, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(80, 4, dtype=torch.float64))[0]
    found = AUTO(group_of([torch.outer(left[:, t], right[:, t]) for t in range(4)]))
    assert found.diagnostics.length_share == pytest.approx(4 / 64 + (1 - 4 / 64) * 0.75, rel=1e-4)
    assert found.delta.norm() < found.diagnostics.length_share * 2.0 + 1e-9


def test_the_length_goes_by_what_the_sum_has():
    lengths = [
        AUTO(group_of(_low(rank, 4))).diagnostics.length_share for rank in (1, 2, 4, 8, 16, 64)
    ]
    assert all(one < other for one, other in pairwise(lengths))
    assert lengths[0] < 0.8 and lengths[-1] > 0.9
    (one,) = _low(2, 1)
    assert AUTO(group_of([one] * 3)).diagnostics.length_share == pytest.approx(1.0)
    beside = AUTO(group_of([*_low(2, 2), 1e-9 * one])).diagnostics.length_share
    assert beside == pytest.approx(AUTO(group_of(_low(2, 2))).diagnostics.length_share, rel=1e-3)


def test_it_does_not_modify_the_updates():
    updates = random_updates(24, 40, 3, 24, 1.0, seed=8)
    before = [update.clone() for update in updates]
    covmerge.merge_layer(updates, "auto", stored=torch.float64)
    assert all(map(torch.equal, updates, before))


def test_what_it_says():
    updates = random_updates(24, 40, 3, 24, 1.0, seed=9)
    found = AUTO(group_of(updates)).diagnostics
    assert 2.5 < found.unlike_experts <= 3.0 and 0.4 < found.flat_share < 0.5
    assert 0.0 < found.agreement < 1.0
    account = summarise([TensorDiagnostics("a", {}, ("x", "y", "z"), (found,))])
    assert account.totals["flat_share"] == pytest.approx(found.flat_share)
    assert dict(account.rows)["h, flat share"].startswith(f"{found.flat_share:.2f},")
    columns = found.report_columns(("x", "y", "z"))
    assert (columns["h, flat share"], columns["s, length"]) == (
        found.flat_share,
        found.length_share,
    )


def test_covmerge_json_and_the_report_have_it(tmp_path):
    made = report(tmp_path, {"code": 0.02, "math": 0.03}, "auto", blocks=1)
    entry = made.manifest["tensors"]["layers.0.mlp.up_proj.weight"]["matrices"][0]
    assert entry["flat_share"] == pytest.approx(0.5 * (1 - entry["unlike_experts"] ** -2))
    assert 0.0 < made.manifest["totals"]["flat_share"] < 0.5
