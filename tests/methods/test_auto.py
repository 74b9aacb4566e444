"""What `auto` promises beyond the laws of all methods, and what the base's inputs do to it."""

from dataclasses import replace
from itertools import pairwise
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import covmerge
from covmerge import LowRank
from covmerge.base.types import LinearGroup
from covmerge.maths.methods.auto_least_squares import least_squares
from covmerge.maths.methods.equalise import Counted, Likeness
from covmerge.maths.methods.factored import merge_factors
from covmerge.maths.reference import REFERENCES
from covmerge.maths.reference.closed_form import equalised
from covmerge.maths.testing.groups import random_rotation, random_updates
from covmerge.methods import registry

AUTO = registry.get("auto")
SHAPES = [(24, 40), (40, 24), (32, 32)]


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def inputs(d_in, rank=None, seed=0, dtype=torch.float64):
    """E[z zᵀ] of inputs a few directions of which outweigh all others."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(d_in, rank or 4 * d_in, generator=generator, dtype=dtype)
    z *= (0.8 ** torch.arange(d_in, dtype=dtype))[:, None]
    return (
        random_rotation(d_in, seed).to(dtype)
        @ (z @ z.mT)
        @ random_rotation(d_in, seed).mT.to(dtype)
    )


def group_of(updates, c0=None, weights=None):
    return LinearGroup(tuple(updates), tuple(weights or [1.0] * len(updates)), base_inputs=c0)


def merged(updates, c0=None, weights=None):
    return AUTO(group_of(updates, c0, weights)).delta


@settings(max_examples=50)
@given(
    shape=st.sampled_from(SHAPES),
    rank=st.sampled_from([None, 5]),
    count=st.integers(1, 5),
    spread=st.sampled_from([1.0, 30.0]),
    low=st.sampled_from([0, 2, 5]),
    weighted=st.booleans(),
    base_norm=st.sampled_from([None, 0.0, 0.3, 3.0]),
    times=st.sampled_from([0.01, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_kernel_and_reference_agree(
    shape, rank, count, spread, low, weighted, base_norm, times, seed
):
    """None, two or all of the experts are of low rank."""
    few = random_updates(*shape, count, 3, spread, seed=seed)
    updates = few[:low] + random_updates(*shape, count, min(shape), spread, seed=seed)[low:]
    weights = [1.0 + t for t in range(count)] if weighted else None
    group = group_of(updates, inputs(shape[1], rank, seed), weights)
    group = replace(group, base_norm=base_norm, base_outputs=base_norm and times * base_norm)
    assert relative(AUTO(group).delta, REFERENCES["auto"](group)) < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factors_and_product_agree_on_the_inputs(shape):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    factors = [LowRank(draw(shape[0], rank), draw(rank, shape[1])) for rank in (2, 12, 3)]
    c0 = inputs(shape[1])
    found = merge_factors(AUTO, factors, [1.0] * 3, {}, inputs=c0).delta.dense()
    assert relative(found, merged([f.dense() for f in factors], c0)) < 1e-7


def test_one_expert_and_copies_of_it_come_back():
    (update,) = random_updates(24, 40, 1, 24, 1.0, seed=3)
    for c0 in (None, inputs(40), inputs(40, rank=6)):
        for count in (1, 2, 5):
            assert relative(merged([update] * count, c0), update) < 1e-8


@pytest.mark.parametrize("c0", [None, inputs(40)], ids=["I", "C0"])
def test_an_update_that_vanishes_vanishes_without_a_jump(c0):
    one, two, three = random_updates(24, 40, 3, 24, 1.0, seed=4)
    without = merged([one, two], c0)
    apart = [
        relative(merged([one, two, 10.0**-power * three], c0), without) for power in range(1, 7)
    ]
    assert all(later < earlier for earlier, later in pairwise(apart))
    assert apart[-1] < 1e-3
    alone = [relative(merged([one, 10.0**-power * three], c0), one) for power in range(1, 7)]
    assert alone[-1] < 1e-3 and max(alone[2:]) < 0.1


@pytest.mark.parametrize("c0", [None, inputs(40)], ids=["I", "C0"])
def test_a_small_change_of_an_update_changes_little(c0):
    updates = random_updates(24, 40, 3, 4, 3.0, seed=5)
    noise = torch.randn(24, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = merged(updates, c0)
    for power in (2, 3, 4, 5):
        moved = [updates[0] + 10.0**-power * updates[0].norm() * noise / noise.norm(), *updates[1:]]
        assert relative(merged(moved, c0), whole) < 20 * 10.0 ** -(power**0.5)


def test_inputs_have_no_scale_and_turn_with_the_layer():
    updates, c0 = random_updates(24, 40, 3, 24, 3.0, seed=6), inputs(40)
    expected = merged(updates, c0)
    assert relative(merged(updates, 1e6 * c0), expected) < 1e-9
    left, right = random_rotation(24, 1), random_rotation(40, 2)
    turned = merged([left @ u @ right.T for u in updates], right @ c0 @ right.T)
    assert relative(turned, left @ expected @ right.T) < 1e-7


def test_inputs_that_never_came_say_nothing():
    updates = random_updates(24, 40, 3, 24, 3.0, seed=7)
    assert torch.equal(merged(updates, torch.zeros(40, 40, dtype=torch.float64)), merged(updates))


def test_inputs_that_see_nothing_of_the_updates_take_theirs_for_alike():
    read = (torch.arange(40) < 20).double()
    updates = [update * read for update in random_updates(24, 40, 3, 24, 3.0, seed=7)]
    found = merged(updates, torch.diag(1 - read))
    assert relative(found, merged(updates, torch.eye(40, dtype=torch.float64))) < 1e-9
    assert relative(merged(updates, torch.diag(1 - read + 1e-9 * read)), found) < 1e-6


def untold(updates, c0):
    """0.1 (1 − ω̄ + 10⁻⁴) of updates that all count alike, times the mean eigenvalue of Ĉ."""
    values = [torch.linalg.svdvals(u).square() for u in updates]
    wide = [float((1e4 * len(v) * v / v.sum()).log1p().mean()) / log(10001) for v in values]
    return 0.1 * (1.0001 - sum(wide) / len(wide)) * float(c0.diagonal().mean())


@pytest.mark.parametrize(("rank", "least", "most"), [(24, 0.0, 0.02), (2, 0.05, 0.1)])
def test_what_inputs_do_not_show_is_unknown_as_far_as_updates_do_not_tell(rank, least, most):
    """As of a C₀ that knows it, which is not asked twice."""
    updates, shown = random_updates(24, 40, 3, rank, 1.0, seed=8), inputs(40, rank=6)
    updates = [update / update.norm() for update in updates]
    share = untold(updates, shown) / float(shown.diagonal().mean())
    assert least < share < most
    group = group_of(updates)
    fused = least_squares(Counted.of(group), 1e-12)
    c0 = shown + untold(updates, shown) * torch.eye(40, dtype=torch.float64)
    assert relative(merged(updates, shown), equalised(group, fused, c0)) < 1e-6
    assert relative(merged(updates, shown), equalised(group, fused, shown)) > 0.02


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (16, 40)], ids=str)
def test_of_updates_that_use_all_directions_alike_no_law_is_lost(shape, count):
    """Old: where 1 − ω̄ was 0 to rounding, which C₀ it was depended on the last place."""
    d_out, d_in = shape
    read = torch.ones(d_in, dtype=torch.float64)
    read[: d_in // 2] = 0.0
    turn = random_rotation(d_in, 3).double()
    updates = [torch.randn(d_out, d_in, generator=seeded(n)).double() * read for n in range(count)]
    updates = [torch.linalg.svd(u, full_matrices=False) for u in updates]
    updates = [3.0 * (u @ vh) @ turn for u, _, vh in updates]
    elsewhere = turn.mT @ torch.diag(1 - read) @ turn if d_in > 1 else torch.zeros(1, 1).double()
    expected = merged(updates, None if d_in == 1 else torch.eye(d_in, dtype=torch.float64))
    assert relative(merged(updates, elsewhere), expected) < 1e-6
    assert relative(merged([1.1 * u for u in updates], elsewhere), 1.1 * expected) < 1e-6
    out = random_rotation(d_out, 5).double()
    assert relative(merged([out @ u for u in updates], elsewhere), out @ expected) < 1e-6
    factors = [LowRank(torch.eye(d_out, dtype=torch.float64), update) for update in updates]
    found = merge_factors(AUTO, factors, [1.0] * count, {}, inputs=elsewhere).delta.dense()
    assert relative(found, expected) < 1e-6
    group = group_of(updates, elsewhere)
    assert relative(REFERENCES["auto"](group), expected) < 1e-6


def test_inputs_of_a_trace_below_zero_are_none():
    updates = random_updates(24, 40, 3, 24, 1.0, seed=8)
    nothing = -torch.eye(40, dtype=torch.float64)
    assert torch.equal(merged(updates, nothing), merged(updates))


@pytest.mark.parametrize(("rank", "told"), [(40, 0.9), (2, 0.18)])
def test_where_nobody_has_measured_them_the_updates_tell_of_inputs_as_they_use_them(rank, told):
    updates = random_updates(40, 40, 3, rank, 1.0, seed=8)
    updates = [7.0 * update / update.norm() for update in updates]  # so that all count alike
    seen = 40 * sum(update.mT @ update / 49.0 for update in updates) / 3
    white = torch.eye(40, dtype=torch.float64)
    used = float(torch.logdet(white + 10000 * seen)) / 40 / log(10001)
    same = used * seen + (1 - used) * white
    added = untold(updates, white)  # to what was measured
    less = added / (1 + added)
    assert merged(updates, same - less * white).allclose(merged(updates), atol=1e-9)
    assert used == pytest.approx(told, abs=0.06)
    assert relative(merged(updates, white), merged(updates)) > 0.02


@pytest.mark.parametrize("weights", [(1.0, 1.0, 0.1), (1.0, 1.0, 8.0), (2.0, 0.3, 1.0)])
@pytest.mark.parametrize("known", [False, True])
def test_an_update_that_vanishes_does_so_without_a_jump_whatever_it_weighs(weights, known):
    *others, last = random_updates(24, 40, 3, 24, 1.0, seed=11)
    given = inputs(40) if known else None

    def of(factor):
        group = LinearGroup((*others, factor * last), weights=weights, base_inputs=given)
        return AUTO(group).delta

    assert relative(of(1e-7), of(0.0)) < 1e-4
    assert relative(of(1e-12), of(0.0)) < 1e-7


def test_what_it_noticed():
    full = random_updates(24, 40, 4, 24, 1.0, seed=9)
    low = random_updates(24, 40, 4, 1, 1.0, seed=9)
    whole, few = (AUTO(group_of(updates)).noticed for updates in (full, low))
    assert 3.5 < whole.unlike_experts <= 4.0 and 3.5 < few.unlike_experts <= 4.0
    assert whole.directions_in_use > 0.8 and few.directions_in_use < 0.2
    assert whole.flattening < 0.6 and few.flattening > 0.65
    assert not whole.inputs_known
    assert AUTO(group_of(full, inputs(40))).noticed.inputs_known


def test_experts_of_one_sum_of_zero():
    update = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    assert covmerge.merge_layer([update, -update], "auto").norm() < 1e-5 * update.norm()


def test_it_does_not_modify_the_inputs():
    updates, c0 = random_updates(24, 40, 3, 24, 3.0, seed=10), inputs(40)
    kept = c0.clone()
    AUTO(replace(group_of(updates), base_inputs=c0))
    assert torch.equal(c0, kept)


def test_lengths_that_it_noticed_are_those_of_what_it_returned():
    """One expert comes back as long as it was; two copies of unlike weights are half of their sum."""
    update = 7.0 * random_updates(24, 40, 1, 24, 1.0, seed=5)[0].double()
    alone = AUTO(group_of([update])).noticed
    assert alone.lengthening == pytest.approx(1.0)
    assert alone.outputs_length == pytest.approx(1.0)
    both = AUTO(group_of([update, update], weights=[0.5, 1.5])).noticed
    assert both.outputs_length == pytest.approx(0.5)


def test_where_nothing_was_changed_it_says_so():
    nothing = AUTO(group_of([torch.zeros(8, 6)] * 3))
    assert not nothing.delta.any()
    assert nothing.noticed.unchanged == 3


def test_experts_that_cancel_give_zeros_and_what_was_noticed():
    update = random_updates(24, 40, 1, 24, 1.0, seed=6)[0]
    found = AUTO(group_of([update, -update]))
    assert found.delta.shape == (24, 40) and not found.delta.any()
    assert found.noticed.unchanged == 0
    assert found.noticed.outputs_length == 0.0


@pytest.mark.parametrize("ratio", [1e-2, 1e-3])
def test_the_least_of_few_directions_counts(ratio):
    """Squared it is far below the rank's end of unsquared numbers."""
    left, right = (
        torch.linalg.qr(torch.randn(n, 4, generator=seeded(n)).double())[0] for n in (24, 40)
    )
    sigma = torch.tensor([1.0, 0.5, 0.1, ratio], dtype=torch.float64)
    turned = random_rotation(4, 9).double()
    updates = [(left * sigma) @ right.mT, (left @ turned * sigma) @ right.mT]
    group = group_of([own.double() for own in updates])
    assert relative(AUTO(group).delta, REFERENCES["auto"](group)) < 1e-9


def seeded(number):
    return torch.Generator().manual_seed(number)


def beside(updates, base_norm, c0=None, weights=None, outputs=None):
    """Beside a base of a norm, whose outputs are as long unless it is said."""
    long = None if c0 is None else base_norm if outputs is None else outputs
    group = group_of(updates, c0, weights)
    return AUTO(replace(group, base_norm=base_norm, base_outputs=long)).delta


@pytest.mark.parametrize("c0", [None, inputs(40)], ids=["I", "C0"])
def test_updates_that_are_long_beside_the_base_are_averaged(c0):
    updates = random_updates(24, 40, 3, 24, 1.0, seed=8)
    mean, alone = torch.stack(updates).mean(0), merged(updates, c0)
    assert torch.equal(beside(updates, None, c0), alone)
    assert relative(beside(updates, 1e4, c0), alone) < 1e-6
    # Of one length all weigh nearly alike; b_t and s_t are what is left.
    assert relative(beside(updates, 0.0, c0), mean) < 1e-2
    sizes = [10.0**power for power in range(-3, 3)]
    far = [relative(beside(updates, size, c0), alone) for size in sizes]
    assert all(later < earlier for earlier, later in pairwise(far))
    if c0 is None:  # at ρ = ⅓ it is half way
        long = 3.0 * sum(float(u.square().sum()) for u in updates) ** 0.5
        assert relative(beside(updates, long), (alone + mean) / 2) < 1e-2


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0, 8.0])
def test_what_is_added_is_held_to_a_share_of_what_the_base_gives(times):
    updates, c0 = random_updates(24, 40, 3, 24, 1.0, seed=8), inputs(40)
    mean, alone = torch.stack(updates).mean(0), merged(updates, c0)
    beyond = untold(updates, c0)
    added = float((alone @ c0 * alone + beyond * alone.square()).sum()) ** 0.5
    kept = (1 + times**4) ** -0.25  # the rest is the average
    size = 4.0 * sum(float(u.square().sum()) for u in updates) ** 0.5
    outputs = ((added / times / 0.15) ** 2 - beyond * size**2) ** 0.5
    found = beside(updates, size, c0, outputs=outputs)
    assert relative(found, kept * alone + (1 - kept) * mean) < 1e-2


def test_of_updates_longer_than_the_base_little_is_left_whatever_its_inputs_see():
    updates, c0 = random_updates(24, 40, 3, 24, 1.0, seed=8), inputs(40)
    mean, alone = torch.stack(updates).mean(0), merged(updates, c0)
    together = sum(float(u.square().sum()) for u in updates) ** 0.5
    assert relative(beside(updates, together, c0, outputs=1e9), (alone + mean) / 2) < 1e-2
    assert relative(beside(updates, together / 10, c0, outputs=1e9), mean) < 1e-2


def test_of_one_expert_and_copies_of_it_the_average_is_the_expert():
    (update,) = random_updates(24, 40, 1, 24, 1.0, seed=3)
    for c0 in (None, inputs(40)):
        for count in (1, 3):
            for size in (0.0, 0.1, 10.0):
                assert relative(beside([update] * count, size, c0), update) < 1e-8


def test_updates_and_base_scale_together():
    updates, c0 = random_updates(24, 40, 3, 24, 3.0, seed=6), inputs(40)
    expected = beside(updates, 0.7, c0)
    for scale in (1e-12, 1e9):
        found = beside([scale * update for update in updates], scale * 0.7, c0)
        assert relative(found, scale * expected) < 1e-7


def test_an_update_that_vanishes_leaves_the_average_too():
    one, two, three = random_updates(24, 40, 3, 24, 1.0, seed=4)
    without = beside([one, two], 0.2)
    apart = [
        relative(beside([one, two, 10.0**-power * three], 0.2), without) for power in range(1, 7)
    ]
    assert all(later < earlier for earlier, later in pairwise(apart)) and apart[-1] < 1e-3
    weights = [1.0, 1.0, 9.0]
    heavy = beside([one, two, 1e-6 * three], 0.2, weights=weights)
    assert relative(heavy, without) < 1e-3


@pytest.mark.parametrize("c0", [None, inputs(40), 1e-6 * inputs(40)], ids=["I", "C0", "small"])
def test_factors_and_product_agree_beside_the_base(c0):
    generator = seeded(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    factors = [LowRank(draw(24, rank), draw(rank, 40)) for rank in (2, 4, 3)]
    dense = [factor.dense() for factor in factors]
    base = 10.0 * torch.randn(24, 40, generator=seeded(1), dtype=torch.float64)
    size = float(base.norm())
    long = None if c0 is None else float((base @ c0 * base).sum()) ** 0.5
    expected = beside(dense, size, c0, outputs=long)
    assert relative(expected, merged(dense, c0)) > 0.05
    how = {"inputs": c0, "base_norm": size, "base_outputs": long}
    assert (
        relative(merge_factors(AUTO, factors, [1.0] * 3, {}, **how).delta.dense(), expected) < 1e-7
    )
    for own in (factors, dense):
        merged_layer = covmerge.merge_layer(own, "auto", base=base, base_inputs=c0)
        whole = merged_layer.dense() if isinstance(merged_layer, LowRank) else merged_layer
        assert relative(whole, expected) < 1e-7


@pytest.mark.parametrize("turned", [False, True], ids=["axes", "turned"])
@pytest.mark.parametrize("nothing", [False, True], ids=["elsewhere", "never"])
def test_factors_and_product_agree_where_inputs_see_nothing_of_them(turned, nothing):
    """What is left of them is rounding; where nothing came in at all the base's weights count."""
    read = (torch.arange(40) < 20).double()
    turn = torch.eye(40, dtype=torch.float64)
    if turned:
        turn = torch.linalg.qr(torch.randn(40, 40, generator=seeded(2), dtype=torch.float64))[0]
    generator = seeded(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    factors = [LowRank(draw(24, r), (draw(r, 40) * read) @ turn.T) for r in (2, 4, 3)]
    base = 10.0 * torch.randn(24, 40, generator=seeded(1), dtype=torch.float64)
    c0 = (0.0 if nothing else 1e4) * (turn * (1 - read)) @ turn.T
    dense = [factor.dense() for factor in factors]
    found = covmerge.merge_layer(factors, "auto", base=base, base_inputs=c0).dense()
    whole = covmerge.merge_layer(dense, "auto", base=base, base_inputs=c0)
    assert relative(found, whole) < 1e-6
    if nothing:
        assert relative(whole, beside(dense, float(base.norm()))) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merge_knows_how_long_the_base_is_within_its_blocks(dtype):
    generator = torch.Generator().manual_seed(1)
    outside = ("pooler.weight", "classifier.1.weight", "merger.mlp.0.weight", "merger.mlp.2.weight")
    names = ("h.0.fc.weight", "h.1.fc.weight", *outside)
    base = {name: torch.randn(70, 40, generator=generator).to(dtype) for name in names}
    experts = {
        f"e{t}": {
            n: (w.float() + torch.randn(70, 40, generator=generator)).to(dtype)
            for n, w in base.items()
        }
        for t in range(3)
    }
    done = covmerge.merge(base, experts, "auto", out_dtype="float32")
    for name in names:
        updates = [own[name].float() - base[name].float() for own in experts.values()]
        start = base[name].float()
        known = None if name in outside else start
        expected = covmerge.merge_layer(updates, "auto", base=known)
        torch.testing.assert_close(done.tensors[name] - start, expected, rtol=1e-4, atol=1e-4)
        (facts,) = done.stats["tensors"][name]["matrices"]
        if known is None:
            assert "towards_average" not in facts
        else:
            assert facts["towards_average"] > 0.9


def test_updates_that_the_base_sees_nothing_of_are_not_alike():
    """Old: 0/0, and N was 1."""
    nothing = Likeness.of(torch.zeros(3, 3).double(), torch.ones(3).double())
    assert nothing.experts == 3.0 and nothing.agreement == 1.0
    seen = torch.arange(40) < 20
    updates = [update.double() for update in random_updates(24, 40, 3, 24, 1.0, seed=0)]
    updates = [updates[0], *(update * ~seen for update in updates[1:])]
    c0 = torch.diag(seen.double())
    merged = AUTO(group_of(updates, c0))
    assert merged.noticed.unlike_experts == pytest.approx(3.0, rel=1e-3)
    assert relative(merged.delta, REFERENCES["auto"](group_of(updates, c0))) < 1e-6
