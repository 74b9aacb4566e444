"""TIES, DARE, DELLA, Consensus Task Arithmetic, EMR: masks, thresholds, streams and shapes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.base.diagnostics import TensorDiagnostics
from covmerge.base.types import LinearGroup
from covmerge.errors import RecipeError
from covmerge.maths.linalg.random import Stream
from covmerge.maths.methods.dare import sparsified
from covmerge.maths.methods.della import keep_probability
from covmerge.maths.methods.elect import thresholds_of
from covmerge.maths.methods.emr import Masses, rescalers, rescalers_of
from covmerge.maths.methods.sparsify import KeptEntries, keep_probabilities
from covmerge.methods import registry
from tests.methods.edge_cases import draw
from tests.methods.golden_cases import elementwise as golden
from tests.methods.golden_cases.common import EXPERTS, NAMES, updates_of
from tests.methods.groups import relative
from tests.tolerance import EPS

METHODS = ["ties", "dare_task_arithmetic", "dare_ties", "della", "consensus", "emr"]
SEEDED = ["dare_task_arithmetic", "dare_ties", "della"]


def group_of(updates, weights=None, offset=0, **given):
    return LinearGroup(
        tuple(updates),
        tuple(weights or [1.0] * len(updates)),
        streams=tuple(Stream(f"fc/{t}", offset) for t in range(len(updates))),
        **given,
    )


def merge(name, group, **parameters):
    method = registry.get(name)
    return method(group, **method.resolve(parameters))


def delta(name, updates, weights=None, **parameters):
    return merge(name, group_of(updates, weights), **parameters).delta


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.3, 1.3]])
def test_opposite_experts_cancel_whatever_their_common_weight(weights):
    update = draw(norms=(0.4,))[0]
    assert not delta("ties", [update, -update], weights, density=1.0).any()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1), (5, 1), (2, 3, 4, 5), (0, 3)])
def test_tensors_of_any_shape(name, shape):
    updates = [torch.full(shape, value) for value in (0.5, 1.0)]
    result = merge(name, group_of(updates))
    assert result.delta.shape == shape
    assert torch.isfinite(result.delta).all()


# Blocks of rows are merged as the whole tensor is, bit for bit.


@pytest.mark.parametrize(
    ("name", "parameters"),
    [(name, {}) for name in METHODS] + [("ties", {"merge": "sum"}), ("dare_ties", {"drop": 0.9})],
)
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 9),
    tail=st.sampled_from([(1,), (5,), (19,), (3, 2, 2)]),
    step=st.integers(1, 4),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_blocks_of_rows_give_the_same_bits(name, parameters, rows, tail, step, weighted, seed):
    method = registry.get(name)
    given = method.resolve(parameters)
    updates = draw((rows, *tail), norms=(0.4, 0.3, 0.2), seed=seed)
    weights = [1.0, 1.3, 0.7] if weighted else None
    whole = group_of(updates, weights)
    if method.ranked(given) is not None:
        vectors = method.global_pass.vectors(whole, given)
        whole = replace(whole, thresholds=thresholds_of(vectors, given["density"]))
    blocks = [
        method(
            group_of(
                [update[start : start + step] for update in updates],
                weights,
                offset=start * updates[0][0].numel(),
                thresholds=whole.thresholds,
            ),
            **given,
        )
        for start in range(0, rows, step)
    ]
    merged = method(whole, **given)
    assert torch.equal(torch.cat([block.delta for block in blocks]), merged.delta)
    for t, mask in enumerate(merged.masks):
        assert torch.equal(torch.cat([block.masks[t] for block in blocks]), mask)


@pytest.mark.parametrize("name", ["ties", "dare_ties"])
def test_a_global_pass_is_needed_for_the_global_trim_only(name):
    method = registry.get(name)
    for chosen, unit, density in [
        ({}, "element", 0.2),
        ({"density": 0.6}, "element", 0.6),
        ({"density": 1.0}, "element", None),
        ({"trim": "tensor"}, "tensor", None),
    ]:
        parameters = method.resolve(chosen)
        assert method.unit_for(parameters) == unit
        assert method.ranked(parameters) == density


# TIES


@pytest.mark.parametrize("density", [1e-6, 0.1, 0.2, 0.37, 0.999, 1.0])
def test_the_threshold_keeps_one_more_than_the_share(density):
    update = draw((13, 17), norms=(1.0,))[0]
    kept = int(delta("ties", [update], density=density).count_nonzero())
    assert kept == min(13 * 17, int(density * 13 * 17) + 1)


def test_a_given_threshold_is_used_instead_of_the_groups_own():
    update = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    group = group_of([update, 2 * update], thresholds=(3.0, 8.0))
    assert merge("ties", group, merge="sum").delta.tolist() == [[0.0, 0.0, 3.0, 12.0]]


def test_weights_vote_and_share():
    updates, weights = [torch.tensor([3.0, 3.0]), torch.tensor([-1.0, 1.0])], [1.0, 7.0]
    assert delta("ties", updates, weights, density=1.0).tolist() == [-1.0, 1.25]
    assert delta("ties", updates, weights, density=1.0, merge="sum").tolist() == [-7.0, 10.0]


# DARE


def test_without_dropping_dare_is_what_follows_it():
    updates = draw()
    plain = delta("dare_task_arithmetic", updates, drop=0.0)
    assert relative(plain, delta("task_arithmetic", updates).double()) < 1e-7
    assert torch.equal(delta("dare_ties", updates, drop=0.0), delta("ties", updates))


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_dare_drops_its_share_and_keeps_the_mean(drop):
    group = group_of([torch.ones(400, 500)])
    for rescale in (True, False):
        vector = next(sparsified(group, drop=drop, rescale=rescale, seed=0))
        kept = float(vector.count_nonzero()) / vector.numel()
        assert kept == pytest.approx(1 - drop, abs=0.005)
        assert float(vector.mean()) == pytest.approx(1.0 if rescale else 1 - drop, abs=0.02)


@pytest.mark.parametrize("name", SEEDED)
def test_masks_follow_from_seed_and_stream_alone(name):
    updates = draw()
    group = group_of(updates)
    usual = merge(name, group).delta
    assert torch.equal(merge(name, group).delta, usual)
    assert not torch.equal(merge(name, group, seed=1).delta, usual)
    renamed = replace(group, streams=tuple(Stream(f"proj/{t}") for t in range(4)))
    assert not torch.equal(merge(name, renamed).delta, usual)
    torch.manual_seed(5)  # the global generator has no say
    assert torch.equal(merge(name, group).delta, usual)


def test_experts_lose_different_entries():
    group = group_of([torch.ones(20, 20)] * 2)
    first, second = sparsified(group, drop=0.5, rescale=True, seed=0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", SEEDED)
def test_float64_draws_the_same_masks(name):
    updates = draw()
    exact = delta(name, [update.double() for update in updates])
    assert relative(delta(name, updates), exact) < 1e-6


@pytest.mark.parametrize("drop", [1.0, -0.1])
def test_a_drop_rate_that_leaves_nothing_is_refused(drop):
    with pytest.raises(RecipeError, match="drop"):
        registry.get("dare_ties").resolve({"drop": drop})


# DELLA


@pytest.mark.parametrize("variant", ["homog", "heterog"])
def test_keep_probabilities_are_the_published_ones(variant):
    """But for equal magnitudes in a row, whose order is arbitrary there and stable here."""
    for name in NAMES:
        for t, update in enumerate(updates_of(variant, name)):
            theirs = golden.stored(golden.DELLA)[f"{variant}/keep_prob/{t}/{name}"]
            ours = keep_probability(update, density=0.3, window=0.2)
            rows = update.abs().reshape(1, -1) if update.dim() == 1 else update.abs()
            tied = (rows[:, :, None] == rows[:, None, :]).sum(2) > 1
            differs = (ours - theirs).abs() > 1e-6
            assert not (differs & ~tied.view_as(update)).any()


def test_larger_entries_are_kept_more_often():
    update = torch.arange(1.0, 101.0).repeat(2000, 1)
    vectors = delta("della", [update], density=0.5, window=0.8, scale=1.0)
    kept = (vectors != 0).float().mean(0)
    assert torch.allclose(kept, torch.linspace(0.1, 0.9, 100), atol=0.05)
    assert torch.allclose(vectors.mean(0), update[0], rtol=0.3)


def test_rows_are_those_of_the_first_axis():
    kernel = draw((4, 3, 2, 2), norms=(1.0,))[0]
    q = keep_probability(kernel, density=0.3, window=0.2)
    assert torch.equal(q.flatten(1), keep_probability(kernel.flatten(1), density=0.3, window=0.2))
    vector = kernel.flatten()
    q = keep_probability(vector, density=0.3, window=0.2)
    assert torch.equal(q, keep_probability(vector[None], density=0.3, window=0.2)[0])


@pytest.mark.parametrize("shape", [(), (1,), (6, 1)])
def test_a_row_of_one_entry_is_kept_with_the_mean_probability(shape):
    """Published: rank 0 of 0, 0/0."""
    assert (keep_probability(torch.ones(shape), density=0.3, window=0.2) == 0.3).all()


@pytest.mark.parametrize(
    ("density", "window"), [(0.1, 0.2), (0.05, 0.2), (0.95, 0.2), (1.0, 0.1), (0.4, 0.9)]
)
def test_probabilities_beyond_their_range_are_refused(density, window):
    with pytest.raises(RecipeError, match=r"density .* window/2 .* within \(0, 1\]"):
        delta("della", draw(), density=density, window=window)


# Consensus


def test_k_is_at_most_the_number_of_experts():
    """Published: k > T leaves the base."""
    update = draw(norms=(0.4,))
    result = merge("consensus", group_of(update), scale=1.0)
    assert torch.equal(result.delta, update[0])
    assert result.stats == {"k": 1}
    pair = draw(norms=(0.4, 0.4))
    assert torch.equal(delta("consensus", pair, k=9), delta("consensus", pair, k=2))


def test_k_zero_is_task_arithmetic():
    updates = draw()
    plain = delta("task_arithmetic", updates)
    assert relative(delta("consensus", updates, k=0), plain.double()) < 1e-6


def test_selfish_and_catastrophic_entries_are_removed():
    updates = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, -0.9])]
    assert delta("consensus", updates, scale=1.0).tolist()[:2] == [0.0, 2.0]
    assert delta("consensus", updates, k=1, scale=1.0).tolist()[:2] == [1.0, 2.0]
    # λ(T − 1) ≥ 1: nobody outweighs three others that agree with it.
    assert not delta("consensus", [torch.ones(3)] * 4, k=1).any()


def test_weights_scale_the_sum_and_leave_the_masks():
    updates, weights = draw(), [20.0, 1.0, 1.0, 1.0]
    plain, weighted = delta("consensus", updates), delta("consensus", updates, weights)
    assert torch.equal(plain != 0, weighted != 0)
    total = delta("task_arithmetic", updates, weights).double()
    assert relative(weighted, torch.where(plain != 0, total, 0.0)) < 1e-6


# EMR


@pytest.mark.parametrize("variant", ["homog", "heterog"])
def test_emr_masks_are_the_published_ones(variant):
    for name in NAMES:
        updates = updates_of(variant, name)
        votes, sizes = sum(updates).abs(), sum(update.abs() for update in updates)
        # No vote is within rounding of zero, so its sign is the same whatever the order of the sum.
        assert (votes >= len(updates) * EPS * sizes).all()
        masks = merge("emr", group_of(updates)).masks
        for t in EXPERTS:
            assert torch.equal(masks[t], golden.stored("emr")[f"{variant}/mask/{t}/{name}"])


def test_one_expert_is_reconstructed_exactly():
    update = draw(norms=(0.4,))
    result = merge("emr", group_of(update))
    assert torch.equal(
        rescalers([result.diagnostics])[0] * result.masks[0] * result.delta, update[0]
    )


def test_an_exact_tie_elects_the_negative_sign():
    update = torch.tensor([1.0, -2.0])
    result = merge("emr", group_of([update, -update], [1.3, 1.3]))
    assert result.delta.tolist() == [-1.0, -2.0]
    assert [mask.tolist() for mask in result.masks] == [[False, True], [True, False]]


def test_rescalers_add_means_over_tensors():
    stats = [
        {"size": 2, "expert_mass": [3.0, 4.0], "kept_mass": [1.0, 2.0]},
        {"size": 8, "expert_mass": [4.0, 0.0], "kept_mass": [8.0, 8.0]},
        {"size": 0, "expert_mass": [0.0, 0.0], "kept_mass": [0.0, 0.0]},  # an empty tensor
    ]
    assert rescalers([Masses(**each) for each in stats]) == [2.0 / 1.5, 2.0 / 2.0]


def test_an_expert_of_which_nothing_is_kept_is_not_rescaled():
    """Published: x/0 and 0/0."""
    updates = [torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([-0.5, -0.5])]
    result = merge("emr", group_of(updates))
    assert rescalers([result.diagnostics]) == [1.0, 1.0, 1.0]
    assert not result.masks[1].any()
    assert not result.masks[2].any()


def test_masses_of_row_blocks_add_up():
    updates = draw()
    whole = merge("emr", group_of(updates)).stats
    parts = [
        merge("emr", group_of([u[rows] for u in updates])).stats
        for rows in (slice(7), slice(7, 24))
    ]
    assert sum(part["size"] for part in parts) == whole["size"]
    for key in ("expert_mass", "kept_mass"):
        added = [sum(masses) for masses in zip(*(part[key] for part in parts), strict=True)]
        assert added == pytest.approx(whole[key], rel=1e-12)


def test_rows_of_one_entry_are_kept_with_the_mean_probability():
    found = keep_probabilities(torch.ones(3, 1), 0.4, 0.1, torch.float64)
    assert found.tolist() == [[0.4]] * 3


def test_rescalers_are_those_of_the_experts_by_name():
    masses = Masses(2, (4.0, 3.0), (2.0, 6.0))
    assert rescalers_of([TensorDiagnostics("fc", {}, ("a", "b"), (masses,))]) == {
        "a": 2.0,
        "b": 0.5,
    }
    assert rescalers_of([]) == {}


def test_what_is_left_has_the_dtype_of_the_update():
    update = torch.ones(3, dtype=torch.float64)
    assert KeptEntries(dtype=torch.float32).of(update).dtype == update.dtype
