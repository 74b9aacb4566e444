"""Every kernel against its reference implementation in float64, over shapes, ranks, weights and dtypes."""

from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covmerge.maths.linalg.lapack import norm
from covmerge.maths.reference import REFERENCES
from covmerge.methods import registry
from tests.covering import by_day
from tests.methods.groups import group_of, random_updates, relative
from tests.methods.variants import ABLATION, LOW_RANK, VARIANTS


def both(name, updates, weights=None, **params):
    """The merged update by the kernel and by the reference implementation."""
    method = registry.get(name)
    group = group_of(method, updates, weights)
    reference = REFERENCES[name](group, **params)
    if method.sees == "weights":
        reference = reference - group.base  # the reference implementation gives W̄
    return method(group, **method.resolve(params)).delta, reference


def of_so_many(name, count):
    """The number of experts that a method merges which is nearest to one."""
    least, most = registry.get(name).experts
    return max(least, min(count, most or count))


def test_every_method_has_a_reference():
    assert set(REFERENCES) == set(registry.names())


@pytest.mark.parametrize(("name", "params"), VARIANTS)
@settings(max_examples=by_day(10, 25), deadline=None)
@given(
    d_out=st.integers(2, 24),
    d_in=st.integers(2, 24),
    count=st.integers(1, 5),
    spread=st.sampled_from([1.0, 2.0, 30.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 10_000),
)
@example(d_out=3, d_in=20, count=3, spread=30.0, weighted=True, seed=1)  # dual
@example(d_out=20, d_in=3, count=3, spread=30.0, weighted=True, seed=1)  # tall
@example(d_out=24, d_in=24, count=1, spread=1.0, weighted=False, seed=2)  # one expert
def test_float64_agrees_with_the_reference(
    name, params, d_out, d_in, count, spread, weighted, seed
):
    count = of_so_many(name, count)
    updates = random_updates(d_out, d_in, count, min(d_out, d_in), spread, seed)
    weights = [1.0 + 0.5 * t if weighted else 1.0 for t in range(count)]
    merged, reference = both(name, updates, weights, **params)
    assert merged.dtype == torch.float64
    # ACTMat divides by eigenvalues down to d_in · 1.2e-7 of the largest: 1e-16 becomes 1e-9.
    assert relative(merged, reference) < 1e-7


@pytest.mark.covering(1)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_low_rank_updates_agree_with_the_reference(name, params, rank):
    limited = {**params, **LOW_RANK.get(name, {})}
    merged, reference = both(
        name, random_updates(20, 16, of_so_many(name, 4), rank, 30.0, seed=7), **limited
    )
    assert relative(merged, reference) < 1e-6


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "params"), VARIANTS)
@pytest.mark.parametrize("shape", [(48, 32), (32, 96), (8, 96), (64, 64)])
def test_float32_is_near_the_reference(name, params, shape):
    updates = random_updates(
        *shape, of_so_many(name, 4), min(shape), 30.0, seed=11, dtype=torch.float32
    )
    merged, reference = both(name, updates, **params)
    assert merged.dtype == torch.float32
    # A weight holds an update to its own digits only: the base's entries are about 1.
    rounding = 1e-6 * prod(shape) ** 0.5 if registry.get(name).sees == "weights" else 0.0
    assert norm(merged.double() - reference) < 1e-3 * norm(reference) + rounding


def test_the_four_ablation_steps_differ():
    updates = random_updates(16, 12, 4, 12, 30.0, seed=5)
    results = [both("ace", updates, **step)[0] for step in ABLATION.values()]
    for i, first in enumerate(results):
        for second in results[i + 1 :]:
            assert relative(first, second) > 1e-3


@pytest.mark.parametrize("step", ABLATION.values(), ids=ABLATION)
@pytest.mark.parametrize(("shape", "rank"), [((20, 48), 20), ((20, 48), 4), ((48, 32), 4)])
def test_ace_without_a_ridge_is_the_limit_of_a_vanishing_one(step, shape, rank):
    updates = random_updates(*shape, 3, rank, 30.0, seed=1)
    merged, reference = both("ace", updates, eps=0.0, **step)
    limit, _ = both("ace", updates, eps=1e-10, **step)
    assert relative(merged, reference) < 1e-2  # by Cholesky, as far as a singular system allows
    assert relative(reference, limit) < 1e-3
