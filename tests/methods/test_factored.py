"""Adapters merged on their factors: the same as the dense merge, for every method that claims it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import covmerge
from covmerge.base.types import LowRank
from covmerge.errors import TensorError
from covmerge.maths.methods.factored import merge_factors
from covmerge.methods import registry
from tests.covering import by_day
from tests.methods.groups import group_of, relative
from tests.methods.variants import LOW_RANK

BY_VOTES = ("ctm",)  # at its defaults: see `test_ctm_by_votes`
VARIANTS = [
    (method.name, {})
    for method in registry
    if method.factored_for(method.resolve({})) and method.name not in BY_VOTES
] + [
    ("ace", {"eps": 1e-2}),
    ("ace", {"tau": 1e-9}),
    ("ace", {"normalize": False, "prior": False}),
    ("ace", {"refine": False, "tau": 1e-9}),
    ("tsv_m", {"lossless": True}),
    ("dc_merge", {"density": 0.2, "smoothing": 5.0}),
    ("resmerge", {"head_rank": 2}),
    ("esm", {"power": 0.0}),
    ("iso_cts", {"common_fraction": 0.4}),
    ("cart", {"rank_ratio": 0.3}),
    *(
        ("knots", {"space": space, "concat": concat, "density": density})
        for concat in ("inputs", "outputs")
        # Two adapters of rank 1 and equal norms have entries of equal magnitude in V: none are trimmed.
        for space, density in (("sv", 0.3), ("sv", 1.0), ("v", 1.0))
    ),
    ("knots", {"inner": "tsv_m"}),
    ("knots", {"inner": "cart", "concat": "outputs", "rank_ratio": 0.4}),
    ("knots", {"inner": "iso_c", "space": "v"}),
    ("core_space", {"inner": "ties", "isotropize": False}),
    ("core_space", {"inner": "ties", "density": 0.7}),
    ("core_space", {"inner": "cart", "rank_ratio": 0.4}),
    ("ctm", {"core_rank": 2, "inner": "task_arithmetic"}),
    ("ctm", {"core_rank": 3, "inner": "tsv_m", "strength": 0.5}),
    ("ctm", {"core_rank": 3, "inner": "iso_c"}),
]


def adapters(d_out, d_in, ranks, spread, seed, deficient=False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for t, rank in enumerate(ranks):
        left = torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
        right = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
        if deficient and rank > 1:
            left[:, -1] = left[:, 0]
        norm = 0.3 * spread ** (t / max(1, len(ranks) - 1)) / spread**0.5
        left *= norm / (left @ right).norm()
        made.append(LowRank(left.to(dtype), right.to(dtype)))
    return made


def both(name, params, updates, weights):
    method = registry.get(name)
    # The rank is plain in the cores; in the dense layer rounding hides it, and ACE refines noise.
    given = method.resolve({**LOW_RANK.get(name, {}), **params})
    full = [u.dense() for u in updates]
    dense = group_of(method, full, weights, factors=tuple(updates))
    factored = merge_factors(
        method, updates, weights, given, measured=dense.expert_statistics
    ).delta
    return factored, method(dense, **given).delta


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
@settings(max_examples=by_day(8, 20), deadline=None)
@given(
    shape=st.sampled_from([(20, 30), (30, 20), (24, 24), (60, 9), (9, 60)]),
    ranks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    spread=st.sampled_from([1.0, 30.0]),
    deficient=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_factored_equals_dense(name, params, shape, ranks, spread, deficient, weighted, seed):
    updates = adapters(*shape, ranks, spread, seed, deficient)
    weights = [1.0 + 0.5 * t if weighted else 1.0 for t in range(len(ranks))]
    factored, dense = both(name, params, updates, weights)
    assert factored.rank == min(sum(ranks), *shape)
    assert relative(factored.dense(), dense) < 1e-5


@pytest.mark.parametrize("name", ["actmat", "wudi", "aswudi", "swudi"])
def test_the_cut_off_goes_by_the_layer_not_by_the_basis(name):
    """Where a spectrum falls through d_in · eps, which in the basis would be Σr · eps."""
    generator = torch.Generator().manual_seed(0)
    falling = 0.5 ** torch.arange(8, dtype=torch.float64)
    updates = [
        LowRank(
            torch.linalg.qr(torch.randn(64, 8, generator=generator, dtype=torch.float64))[0]
            * falling,
            torch.linalg.qr(torch.randn(1024, 8, generator=generator, dtype=torch.float64))[0].mT,
        )
        for _ in range(3)
    ]
    factored, dense = both(name, {}, updates, [1.0, 1.0, 1.0])
    assert relative(factored.dense(), dense) < 1e-6


@pytest.mark.parametrize("params", [{}, {"core_rank": 2}], ids=str)
def test_ctm_by_votes(params):
    """Apart, as the votes of two adapters of rank 1 cancel, and rounding would decide who is elected."""
    updates = adapters(20, 30, [4, 2, 8], 3.0, seed=2)
    factored, dense = both("ctm", params, updates, [1.0, 2.0, 1.5])
    assert relative(factored.dense(), dense) < 1e-10


@pytest.mark.parametrize("concat", ["inputs", "outputs"])
def test_knots_in_v_trimmed(concat):
    updates = adapters(20, 30, [4, 2, 8], 3.0, seed=2)
    factored, dense = both("knots", {"space": "v", "concat": concat}, updates, [1.0, 2.0, 1.5])
    assert relative(factored.dense(), dense) < 1e-10


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
def test_float32_adapters(name, params):
    updates = adapters(48, 64, [4, 2, 8], 3.0, seed=1, dtype=torch.float32)
    factored, _ = both(name, params, updates, [1.0] * 3)
    exact = [LowRank(u.left.double(), u.right.double()) for u in updates]
    _, dense = both(name, params, exact, [1.0] * 3)
    assert factored.left.dtype == torch.float32
    assert relative(factored.dense(), dense) < 1e-5


def test_who_claims_it():
    claimed = {m.name for m in registry if m.factored_for(m.resolve({}))}
    assert {
        "average",
        "task_arithmetic",
        "ace",
        "actmat",
        "wudi",
        "aswudi",
        "swudi",
        "auto",
        "tsv_m",
        "dc_merge",
        "iso_c",
        "cart",
        "knots",
        "core_space",
        "ctm",
        "ssr",
    } <= claimed
    wudi = registry.get("wudi")
    assert not wudi.factored_for(wudi.resolve({"solver": "adam"}))


@pytest.mark.parametrize(
    ("params", "sides"),
    [
        ({}, "outputs"),
        ({"concat": "outputs"}, "inputs"),
        ({"inner": "tsv_m"}, "both"),
        ({"inner": "average", "concat": "outputs"}, "both"),
    ],
)
def test_ties_turns_with_one_side_of_the_knots(params, sides):
    knots = registry.get("knots")
    assert knots.sides_for(knots.resolve(params)) == sides


@pytest.mark.parametrize("concat", ["inputs", "outputs"])
def test_the_other_side_is_written_out(concat):
    """Cores are (Σr, d_in) or (d_out, Σr), never (d_out, d_in), and the rank is bounded all the same."""
    method = registry.get("knots")
    given = method.resolve({"concat": concat})
    merged = merge_factors(method, adapters(50, 40, [2, 3], 3.0, seed=0), [1.0, 1.0], given)
    assert merged.core.shape == ((5, 40) if concat == "inputs" else (50, 5))
    for rank in (1, 5):
        truncated, sigma = merged.truncated(rank)
        assert truncated.rank == rank
        assert len(sigma) == 5
    assert relative(merged.truncated(5)[0].dense(), merged.delta.dense()) < 1e-12


def test_zero_adapters_give_nothing():
    nothing = LowRank(torch.zeros(6, 2), torch.randn(2, 5))
    for name, params in VARIANTS:
        method = registry.get(name)
        data = group_of(method, [nothing.dense()] * 2).expert_statistics
        given = method.resolve(params)
        merged = merge_factors(method, [nothing] * 2, [1.0] * 2, given, measured=data)
        assert not merged.delta.dense().any()


class TestMergeLayer:
    def test_factors_in_factors_out(self):
        updates = adapters(20, 30, [2, 3], 3.0, seed=0)
        merged = covmerge.merge_layer(updates, "actmat")
        assert isinstance(merged, LowRank)
        dense = covmerge.merge_layer([u.dense() for u in updates], "actmat")
        assert relative(merged.dense(), dense) < 1e-8

    def test_methods_that_look_at_entries_return_the_product(self):
        updates = adapters(20, 30, [2, 3], 3.0, seed=0)
        merged = covmerge.merge_layer(updates, "ties")
        assert torch.equal(merged, covmerge.merge_layer([u.dense() for u in updates], "ties"))

    def test_factors_beside_full_updates(self):
        low, full = adapters(20, 30, [2, 3], 3.0, seed=0)
        merged = covmerge.merge_layer([low, full.dense()], "ace")
        assert torch.equal(merged, covmerge.merge_layer([low.dense(), full.dense()], "ace"))

    def test_half_precision(self):
        updates = [u.to(torch.bfloat16) for u in adapters(20, 30, [2, 3], 3.0, seed=0)]
        merged = covmerge.merge_layer(updates, "iso_c")
        assert merged.dtype == torch.bfloat16

    def test_errors_name_the_update(self):
        low, other = adapters(20, 30, [2, 3], 3.0, seed=0)
        with pytest.raises(TensorError, match=r"update 1 is \[30, 20\]"):
            covmerge.merge_layer([low, LowRank(other.right.T, other.left.T)], "ace")
        other.right[0, 0] = float("nan")
        with pytest.raises(TensorError, match="update 1 holds NaN"):
            covmerge.merge_layer([low, other], "ace")
