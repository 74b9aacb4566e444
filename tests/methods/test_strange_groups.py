"""Groups as nobody trains them, over every method: finite or refused by name, and not by chance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import covmerge
from covmerge.errors import TensorError
from covmerge.methods import registry
from tests.methods.groups import group_of

METHODS = [pytest.param(method, id=method.name) for method in registry]
SHAPES = [(1, 1), (1, 7), (7, 1), (2, 2), (3, 20), (20, 3), (12, 12), (24, 16), (5, 40)]
KINDS = ["full", "low", "zero", "copy", "opposite", "orthogonal", "one entry", "one row", "graded"]
# What a flat spectrum, and a ridge, make of directions that only rounding has: see the noise of a group.
BY_RANK = {"ace", "iso_c", "iso_cts"}
# Where votes cancel but for their rounding, that is who is elected.
BY_VOTES = {"ties", "dare_ties", "della", "emr", "knots"}


def strange(shape, experts, seed):
    """Updates of the named kinds and sizes, float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    updates = []
    for kind, size in experts:
        update = random(*shape)
        left, sigma, right = torch.linalg.svd(update, full_matrices=False)
        if kind == "low":
            update = random(shape[0], 1) @ random(1, shape[1])
        elif kind == "orthogonal":
            update = left @ right
        elif kind == "graded":
            update = left @ torch.diag(torch.logspace(0, -5, len(sigma)).double()) @ right
        elif kind == "one entry":
            update = torch.zeros_like(update)
            update[-1, 0] = 1.0
        elif kind == "one row":
            update = update[:1].expand(shape).clone()
        update *= size / update.norm()
        if kind == "zero":
            update = torch.zeros_like(update)
        elif kind in ("copy", "opposite") and updates:
            update = updates[0].clone() if kind == "copy" else -updates[0]
        updates.append(update)
    return updates


def merge(method, updates, weights=None):
    """The merged update, or None where the method says by its name that it cannot."""
    data = [measured.value for measured in group_of(method, updates).measured]
    try:
        merged = covmerge.merge_layer(updates, method.name, weights=weights, data=data)
    except TensorError as error:
        assert f"method '{method.name}'" in str(error) or "`eps`" in str(error)
        return None
    assert merged.dtype == updates[0].dtype
    assert torch.isfinite(merged).all()
    return merged.double()


def arbitrary(method, updates):
    given = method.resolve({})
    return "arbitrary" in method(group_of(method, updates), **given).stats


def apart(one, other, updates):
    """How far, beside what the result is, or may be where experts cancel."""
    size = max(float(update.norm()) for update in updates)
    return float((one - other).norm()) / max(float(other.norm()), 1e-6 * size, 1e-300)


experts = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from([0.3, 0.3, 30.0, 3e-4, 3e-7])),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=st.sampled_from(SHAPES), experts=experts, seed=st.integers(0, 1000))
def test_strange_groups(method, shape, experts, seed):
    updates = strange(shape, experts, seed)
    double = merge(method, updates)
    single = merge(method, [update.float() for update in updates])
    if double is None or single is None or arbitrary(method, updates):
        return
    cancelling = method.name in BY_VOTES and any(kind == "opposite" for kind, _ in experts)
    if method.name not in BY_RANK and not cancelling:
        assert apart(single, double, updates) < 1e-2


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    experts=experts,
    exponent=st.sampled_from([-100, -60, -25, 25, 60, 100]),
    seed=st.integers(0, 1000),
)
def test_strange_groups_of_any_size(method, shape, experts, exponent, seed):
    updates = [update.float() for update in strange(shape, experts, seed)]
    merge(method, [update * 2.0**exponent for update in updates])
    wide = [update.double() * 2.0 ** (4 * exponent) for update in updates]
    merged, expected = merge(method, wide), merge(method, [update.double() for update in updates])
    if method.laws.scale_equivariant and not arbitrary(method, wide):
        assert merged is not None and expected is not None
        assert apart(merged * 2.0 ** (-4 * exponent), expected, updates) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(shape=st.sampled_from(SHAPES), experts=experts, seed=st.integers(0, 1000))
def test_strange_groups_in_another_order(method, shape, experts, seed):
    if method.data != "none":
        return  # its data belongs to places here
    updates = strange(shape, experts, seed)
    weights = [1.0 + 0.5 * t for t in range(len(updates))]
    merged, again = merge(method, updates, weights), merge(method, updates[::-1], weights[::-1])
    if merged is not None and again is not None and not arbitrary(method, updates):
        assert apart(again, merged, updates) < (1e-2 if method.name in BY_RANK else 1e-5)
