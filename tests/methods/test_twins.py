"""Every kernel against its naive float64 twin, over shapes, ranks, weights and dtypes."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covmerge.methods import registry
from covmerge.types import LinearGroup
from tests.methods.twins import TWINS

ABLATION = {
    "E1": {"normalize": False, "prior": False},
    "E2": {"prior": False, "refine": False},
    "E3": {"refine": False},
    "E4": {},
}
VARIANTS = [
    ("average", {}),
    ("task_arithmetic", {"scale": 0.4}),
    ("actmat", {}),
    *[("ace", {"eps": eps, **step}) for eps in (1e-5, 1e-2) for step in ABLATION.values()],
    ("ace", {"gate": "scale_free", "tau": 0.5, "k_frac": 0.6}),
    ("ace", {"tau": 1e-9}),  # fires for nearly equal norms
]


def random_updates(d_out, d_in, count, rank, spread, seed, dtype=torch.float64):
    """Updates of a given rank whose norms spread over a factor."""
    generator = torch.Generator().manual_seed(seed)
    updates = []
    for t in range(count):
        left = torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
        right = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
        update = left @ right
        norm = 0.3 * spread ** (t / max(1, count - 1)) / spread**0.5
        updates.append((update * norm / update.norm()).to(dtype))
    return updates


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def test_every_method_has_a_twin():
    assert set(TWINS) == set(registry.names())


@pytest.mark.parametrize(("name", "params"), VARIANTS)
@settings(max_examples=25, deadline=None)
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
def test_float64_agrees_with_the_twin(name, params, d_out, d_in, count, spread, weighted, seed):
    updates = random_updates(d_out, d_in, count, min(d_out, d_in), spread, seed)
    weights = [1.0 + 0.5 * t if weighted else 1.0 for t in range(count)]
    merged = registry.get(name)(LinearGroup(tuple(updates), tuple(weights)), **params).delta
    assert merged.dtype == torch.float64
    # ACTMat divides by eigenvalues down to d_in · 1.2e-7 of the largest: 1e-16 becomes 1e-9.
    assert relative(merged, TWINS[name](updates, weights, **params)) < 1e-7


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_low_rank_updates_agree_with_the_twin(name, params, rank):
    # k stays within the rank: beyond it the twin's directions are arbitrary.
    limited = {**params, "rank_rtol": 1e-9} if name == "ace" else params
    updates = random_updates(20, 16, 4, rank, 30.0, seed=7)
    weights = [1.0] * 4
    merged = registry.get(name)(LinearGroup(tuple(updates), tuple(weights)), **limited).delta
    assert relative(merged, TWINS[name](updates, weights, **limited)) < 1e-6


@pytest.mark.parametrize(("name", "params"), VARIANTS)
@pytest.mark.parametrize("shape", [(48, 32), (32, 96), (8, 96), (64, 64)])
def test_float32_is_near_the_twin(name, params, shape):
    updates = random_updates(*shape, 4, min(shape), 30.0, seed=11, dtype=torch.float32)
    merged = registry.get(name)(LinearGroup(tuple(updates), (1.0,) * 4), **params).delta
    assert merged.dtype == torch.float32
    assert relative(merged, TWINS[name](updates, [1.0] * 4, **params)) < 1e-3


def test_the_four_ablation_steps_differ():
    updates = random_updates(16, 12, 4, 12, 30.0, seed=5)
    group = LinearGroup(tuple(updates), (1.0,) * 4)
    results = [registry.get("ace")(group, **step).delta for step in ABLATION.values()]
    for i, first in enumerate(results):
        for second in results[i + 1 :]:
            assert relative(first, second) > 1e-3
