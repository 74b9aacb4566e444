"""Groups as nobody trains them, over every method: finite or refused by name, and not by chance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import covmerge
from covmerge.errors import RecipeError
from covmerge.maths.linalg.lapack import norm, svd
from covmerge.maths.testing.strange import (
    EXPONENTS,
    KINDS,
    SHAPES,
    SIZES,
    apart,
    is_arbitrary,
    merge_strange,
    of_any_size,
)
from covmerge.maths.testing.strange import strange_updates as strange
from covmerge.maths.testing.subject import Subject
from covmerge.methods import registry
from tests.covering import by_day

METHODS = [pytest.param(method, id=method.name) for method in registry]
# A weight holds an update to its own digits only.
OF_UPDATES = [pytest.param(m, id=m.name) for m in registry if m.sees == "updates"]
# What a flat spectrum, and a ridge, make of directions that only rounding has: see the noise of a group.
BY_RANK = {"ace", "iso_c", "iso_cts", "esm"}
# Where votes cancel but for their rounding, that is who is elected.
BY_VOTES = {"ctm", "ties", "dare_ties", "della", "emr", "knots"}
# Where two magnitudes are equal but for their rounding, that is which of them is kept.
BY_SIZE = {"ties", "dare_ties", "della"}
# What float32 holds of the longest update through a solve with a ridge of a tenth, whose condition is 10 d;
# where updates cancel the merged one may be as short.
HELD = 256 * torch.finfo(torch.float32).eps


def merge(method, updates, weights=None):
    return merge_strange(Subject(method.name), updates, weights)


def arbitrary(method, updates):
    singles = [update.float() for update in updates]
    return any(is_arbitrary(Subject(method.name), own) for own in (updates, singles)) or (
        (method.name in BY_VOTES and _cancel(updates))
        or (method.name in BY_SIZE and any(map(_nearly_equal, updates)))
        or (method.name == "ctm" and _of_one_norm(updates))
        or (method.name == "knots" and 1 in updates[0].shape and _of_one_norm(updates))
        or (method.name == "cart" and _cut_among_equals(updates))
    )


def _cancel(updates):
    """Whether numbers that vote are opposite by chance: the sign of their sum is that of a rounding."""
    total, size = sum(updates), sum(update.abs() for update in updates)
    return bool(((total.abs() <= 1e-6 * size) & (size > 0)).any())


def _nearly_equal(update):
    """Whether two of its magnitudes differ, and by no more than rounding: those of a turn in a plane."""
    sizes = update.abs().flatten().sort().values
    gaps = sizes.diff()
    return bool(((gaps > 0) & (gaps <= 1e-7 * sizes[1:])).any())


def _cut_among_equals(updates):
    """Whether CART cuts an update less the mean between singular values that rounding tells apart."""
    mean, held = sum(updates) / len(updates), HELD * max(map(norm, updates))
    spectra = [svd(update - mean)[1] for update in updates]
    return any(
        len(sigma) > 1 and sigma[0] > held and bool((sigma[:-1] - sigma[1:] <= held)[_cut(sigma)])
        for sigma in spectra
    )


def _cut(sigma):
    return max(1, int(0.12 * len(sigma))) - 1


def _of_one_norm(updates):
    """Whether two updates have one norm: their difference, a common direction, has them opposite."""
    norms = [round(float(update.norm()), 6) for update in updates]
    return len(set(norms)) < len(norms)


experts = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(SIZES)), min_size=1, max_size=5
)


@pytest.mark.parametrize("method", OF_UPDATES)
@settings(max_examples=by_day(10, 25), deadline=None, derandomize=True)
@given(shape=st.sampled_from(SHAPES), experts=experts, seed=st.integers(0, 1000))
def test_strange_groups(method, shape, experts, seed):
    updates = strange(shape, experts, seed)
    double = merge(method, updates)
    single = merge(method, [update.float() for update in updates])
    if double is None or single is None or arbitrary(method, updates):
        return
    cancelling = method.name in BY_VOTES and any(kind == "opposite" for kind, _ in experts)
    if method.name not in BY_RANK and not cancelling:
        longest = max(map(norm, updates))
        assert norm(single - double) <= 1e-2 * norm(double) + HELD * longest


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=by_day(6, 15), deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    experts=experts,
    exponent=st.sampled_from(EXPONENTS),
    seed=st.integers(0, 1000),
)
def test_strange_groups_of_any_size(method, shape, experts, exponent, seed):
    of_any_size(Subject(method.name), strange(shape, experts, seed), exponent)


@pytest.mark.parametrize("method", OF_UPDATES)
@settings(max_examples=by_day(6, 15), deadline=None, derandomize=True)
@given(shape=st.sampled_from(SHAPES), experts=experts, seed=st.integers(0, 1000))
def test_strange_groups_in_another_order(method, shape, experts, seed):
    if method.data != "none":
        return  # its data belongs to places here
    updates = strange(shape, experts, seed)
    weights = [1.0 + 0.5 * t for t in range(len(updates))]
    merged, again = merge(method, updates, weights), merge(method, updates[::-1], weights[::-1])
    if merged is not None and again is not None and not arbitrary(method, updates):
        assert apart(again, merged, updates) < (1e-2 if method.name in BY_RANK else 1e-5)


@pytest.mark.parametrize("method", ["iso_c", "free", "cart", "average"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_matrices_without_entries(method, shape):
    assert covmerge.merge_layer([torch.zeros(shape)] * 2, method).shape == shape
    with pytest.raises(RecipeError, match=r"weights \[1\.0\] for 2 updates"):
        covmerge.merge_layer([torch.zeros(shape)] * 2, method, weights=[1.0])
    base = {"fc.weight": torch.zeros(4, 4), "empty.weight": torch.zeros(shape)}
    experts = {e: {**base, "fc.weight": torch.randn(4, 4)} for e in "ab"}
    merged = covmerge.merge(base, experts, method).tensors
    assert merged["empty.weight"].shape == shape and merged["fc.weight"].any()
    assert covmerge.inspect(base, experts).layers
