"""Polar factors and projectors by products alone, against the SVD in float64, and who asks for them."""

from math import log10

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge import merge_layer
from covmerge.base.types import Rounding
from covmerge.maths.linalg import auto, by_products
from covmerge.maths.linalg import polar as polar_rules
from covmerge.maths.linalg.by_products import inverse_root, largest_bound, newton_schulz, projector
from covmerge.maths.linalg.pinv import (
    cut_off_right,
    kept_eigenpairs,
    kept_projector,
    largest_singular_values,
)
from covmerge.maths.linalg.polar import goes_by_products, polar, polar_by_products
from covmerge.maths.linalg.spectral import EXACT, RankRule, leading_directions, rank_tolerance
from covmerge.maths.methods import iso, registry
from tests.methods.groups import group_of, random_updates, relative
from tests.methods.test_costs import allocated
from tests.methods.test_references import both
from tests.methods.variants import VARIANTS

DTYPES = [torch.float32, torch.float64]


@pytest.fixture
def slow_eigenproblems(monkeypatch):
    """The CPU as a device on which the table has products win wherever they might."""
    monkeypatch.setitem(auto.EIGENPROBLEM, "cpu", 1e6)


def basis(d, k, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64)).Q


def of_spectrum(sigma, d_out, d_in, dtype=torch.float64):
    sigma = torch.as_tensor(sigma, dtype=torch.float64)
    return ((basis(d_out, len(sigma), 1) * sigma) @ basis(d_in, len(sigma), 2).mT).to(dtype)


def steps(condition, k=12):
    return torch.logspace(0, -log10(condition), k, dtype=torch.float64)


def truth(matrix, rtol):
    """U Vᵀ within the numerical rank, that rank, and Σσ: by the SVD in float64."""
    left, sigma, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    k = int((sigma > rtol * sigma[:1]).sum()) if len(sigma) else 0
    return left[:, :k] @ right[:k], k, float(sigma[:k].sum())


def default(matrix):
    return rank_tolerance(matrix.shape, matrix.dtype, None)


# Spectra: of low rank, clustered, equal, with and without a gap; a float32 matrix of lower rank ends in
# rounding of some 1e-8 of its largest.
SPECTRA = {
    "rank 3 of 12": [3.0, 2.0, 1.0] + [0.0] * 9,
    "rank 1": [2.0] + [0.0] * 11,
    "clusters": [4.0] * 4 + [1.0 + 1e-9 * i for i in range(4)] + [1e-2] * 4,
    "a cluster and nothing": [1.0] * 5 + [0.0] * 7,
    "all equal": [7.0] * 12,
    "ones": [1.0] * 12,
    "1/i": [1.0 / i for i in range(1, 13)],
    "condition 100": steps(1e2),
    "condition 1e4": steps(1e4),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(12, 12), (12, 40), (40, 12)])
@pytest.mark.parametrize("name", SPECTRA)
def test_a_polar_factor_is_that_of_the_svd(name, shape, dtype, slow_eigenproblems):
    """Whichever way it goes: of ranks that products do not show in float64, by the SVD."""
    matrix = of_spectrum(SPECTRA[name], *shape, dtype)
    rtol = default(matrix)
    expected, k, nuclear = truth(matrix, rtol)
    found = polar(matrix, rtol=rtol)
    assert found.isometry.dtype == dtype and found.isometry.shape == shape
    assert found.k == k
    assert found.nuclear == pytest.approx(nuclear, rel=1e-7)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-10
    assert (found.isometry.double() - expected).norm() < tolerance


@pytest.mark.parametrize("shape", [(12, 12), (12, 40), (40, 12)])
@pytest.mark.parametrize("name", SPECTRA)
def test_products_tell_of_float32(name, shape):
    matrix = of_spectrum(SPECTRA[name], *shape, torch.float32)
    found = polar_by_products(matrix, RankRule(default(matrix)))
    assert found is not None
    assert found.k == truth(matrix, default(matrix))[1]


@settings(max_examples=60, deadline=None)
@given(
    d_out=st.integers(1, 20),
    d_in=st.integers(1, 20),
    rank=st.integers(0, 20),
    digits=st.floats(0, 12),
    equal=st.integers(1, 4),
    size=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
)
def test_what_products_say_is_true(d_out, d_in, rank, digits, equal, size, dtype):
    """At any condition from 1 to 1e12, rank and scale: what the SVD says, or nothing."""
    k = min(d_out, d_in, rank)
    sigma = torch.logspace(0, -digits, max(1, k), dtype=torch.float64)[: max(k, 1)] * (k > 0)
    sigma = sigma[torch.arange(len(sigma)) // equal * equal]
    matrix = of_spectrum(sigma * 2.0**size, d_out, d_in, dtype)
    rtol = default(matrix)
    found = polar_by_products(matrix, RankRule(rtol))
    if found is None:
        return
    expected, known, nuclear = truth(matrix, rtol)
    assert found.k == known
    assert found.nuclear == pytest.approx(nuclear, rel=1e-6)
    # The rounding of G, of eps times the condition of G; and that of the result.
    tolerance = 3e-6 if dtype == torch.float32 else 1e-10
    assert (found.isometry.double() - expected).norm() < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (4, 4)])
def test_small_and_empty_matrices(shape, dtype, slow_eigenproblems):
    matrix = -torch.ones(shape, dtype=dtype)
    found = polar(matrix, rtol=1e-6)
    assert found.k == 1
    assert torch.allclose(found.isometry, matrix / matrix.norm(), atol=1e-6)
    for nothing in (torch.zeros(shape, dtype=dtype), torch.zeros(0, 3, dtype=dtype)):
        assert polar_by_products(nothing, RankRule(1e-6)) is None
    zero = polar(torch.zeros(shape, dtype=dtype), rtol=1e-6)
    assert zero.k == 0 and not zero.isometry.any()


def test_copies_are_divided_and_opposites_are_one_direction(slow_eigenproblems):
    vectors = basis(30, 3, 5).float()
    for side in (torch.cat([vectors] * 4, 1), torch.cat([vectors, -vectors], 1)):
        found = polar_by_products(side, RankRule(default(side)))
        assert found.k == 3
        copies = side.shape[1] // 3
        assert torch.allclose(found.isometry, side / copies**0.5, atol=1e-6)


@pytest.mark.parametrize(
    "sigma",
    [
        [1.0, 0.5, 3e-6],  # at the end of the rank
        [1.0, 1e-3, 2e-5, 1e-7],  # of lower rank, and one beyond the coarse cut
        steps(1e12),
        [float("nan"), 1.0],
        [float("inf"), 1.0],
    ],
)
def test_what_products_cannot_tell_is_left_to_the_eigenproblem(sigma):
    matrix = of_spectrum(sigma, 12, 12, torch.float32)
    assert polar_by_products(matrix, RankRule(3e-6)) is None


def test_errors_of_columns_are_no_directions(slow_eigenproblems):
    """Below the errors there is an answer of the eigenproblem alone; above them the same one of both."""
    matrix = of_spectrum([1.0, 0.5, 0.02], 9, 3, torch.float32)
    given = {"errors": torch.full((3,), 0.01).double(), "doubts": torch.full((3,), 0.03).double()}
    assert polar_by_products(matrix, RankRule(1e-5), errors=0.03) is None
    assert polar_by_products(matrix, RankRule(1e-5), errors=0.01).k == 3
    found = polar(matrix, rtol=1e-5, **given)
    assert (found.k, found.doubtful) == (3, 1)
    assert polar(matrix, rtol=1e-5, errors=given["doubts"]).k == 2


def test_rounding_ends_a_rank():
    """As `RankRule` has it: where what is below is no more than rounding, and not else."""
    matrix = of_spectrum([3.0, 2.0] + [1e-3] * 10, 12, 12, torch.float32)
    edge = 2e-3
    for energy, k in ((1e-4, 2), (1e-9, 12)):
        found = polar_by_products(matrix, RankRule(1e-5, Rounding(edge, energy)))
        assert found.k == k
        assert found.nuclear == pytest.approx(5.0 if k == 2 else 5.01, rel=1e-6)


@pytest.mark.parametrize(("floor", "rank"), [(2.5, 1), (2e-3, 2), (1e-5, 12), (4.0, 0)])
def test_a_rank_ends_no_lower_than_the_floor_of_a_sum(floor, rank):
    matrix = of_spectrum([3.0, 2.0] + [1e-3] * 10, 12, 12, torch.float32)
    found = polar_by_products(matrix, RankRule(1e-5, Rounding(floor=floor)))
    gram = matrix.double() @ matrix.double().mT
    values, _ = kept_eigenpairs(gram, RankRule(1e-10, Rounding(floor=floor)))
    assert len(values) == rank
    assert found.k == rank if rank else found is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_singular_values_are_found_to_a_tenth(dtype):
    kinds = [
        *(of_spectrum(sigma, 20, 30, dtype) for sigma in (steps(1e6), [1.0] * 20, [3.0])),
        torch.randn(20, 30, generator=torch.Generator().manual_seed(1)).to(dtype),
        torch.zeros(20, 30, dtype=dtype),
    ]
    found, expected = largest_singular_values(torch.stack(kinds)), torch.stack(kinds).double()
    expected = torch.linalg.svdvals(expected)[:, 0]
    assert (found <= expected * (1 + 1e-6)).all() and (found >= 0.9 * expected).all()


def test_the_steps_are_those_of_the_table():
    assert len(list(by_products._scales(by_products.NEAREST))) == auto.STEPS


@pytest.mark.parametrize("least", [1.0, 0.3, 1e-3, 1e-7])
def test_newton_and_schulz_take_all_of_an_interval_to_one(least):
    sigma = torch.cat([torch.tensor([1.0, least]).double(), steps(1 / least, 10)])
    found = newton_schulz(of_spectrum(sigma, 12, 12), least)
    # Rounding of the first step has grown as much as the smallest value.
    assert (found - truth(of_spectrum(sigma, 12, 12), 0.0)[0]).norm() < 1e-14 / least + 1e-13


def test_the_steps_wait_for_nothing_and_stay_where_they_are():
    """Tensors of the device `meta` have no values to be read, and meet none of another device."""
    nowhere = torch.empty(300, 300, dtype=torch.float64, device="meta")
    assert newton_schulz(nowhere, 1e-3).device.type == "meta"


def test_a_root_is_shown_to_have_what_it_needs():
    system = of_spectrum([1.0] * 12, 12, 12)
    gram = system @ torch.diag(steps(1e6)) @ system.mT
    gram = (gram + gram.mT) / 2
    for condition in (1e-3, 1e-7):
        root = inverse_root(gram, floor=condition)
        if condition == 1e-3:
            assert root is None
        else:
            assert (root @ gram @ root - torch.eye(12)).norm() < 1e-9
            assert torch.equal(root, root.mT)
    assert inverse_root(-gram, floor=1e-9) is None
    assert inverse_root(torch.zeros(3, 3).double(), floor=1e-9) is None


def symmetric(values, seed=3):
    values = torch.as_tensor(values, dtype=torch.float64)
    turn = basis(len(values), len(values), seed)
    found = (turn * values) @ turn.mT
    return (found + found.mT) / 2, turn


def test_no_eigenvalue_exceeds_the_bound():
    matrix, _ = symmetric([3.0, -7.0, 1.0])
    assert 7.0 <= largest_bound(matrix) < 12.0
    assert largest_bound(torch.eye(9)) == 1.0


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 5 + [0.0] * 7,
        [1.0, 0.3, 0.0101, 0.0099] + [0.0] * 4,  # close to the cut-off, on both sides
        [1.0] * 3 + [0.02 + 1e-12 * i for i in range(4)] + [0.0] * 3,
        [1.0 / (i + 0.3) ** 2 for i in range(25)],
        [1.0] * 4,  # all of them
    ],
)
def test_a_projector_is_that_of_the_eigenvectors(values):
    matrix, turn = symmetric(values)
    bound = 1.01 * float(max(values))
    found = projector(matrix, low=0.01 * (1 - 1e-6), high=0.01, bound=bound)
    kept = turn[:, torch.as_tensor(values) > 0.01]
    assert found.rank == kept.shape[1]
    assert (found.matrix - kept @ kept.mT).norm() < 1e-10


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([1.0, 0.5, 0.01], 0.01, 0.01),  # at the cut-off
        ([1.0, 0.01 + 1e-11, 0.0], 0.01, 0.01),  # too close for the steps
        ([1.0, 0.5, 0.0115], 0.01, 0.012),  # where the cut-off may be, on either side of the cut
        ([1.0, 0.5, 0.0105], 0.01, 0.012),
        ([1.0, 0.5, 1e-8, 0.0], 1e-9, 1e-9),  # one that no cut can be made at
        ([1.0, float("nan")], 0.1, 0.1),
    ],
)
def test_a_cut_off_that_products_cannot_tell(values, low, high):
    assert projector(symmetric(values)[0], low=low, high=high, bound=1.0) is None


def test_nothing_is_kept_of_nothing():
    found = projector(torch.zeros(2, 2).double(), low=0.1, high=0.1, bound=1.0)
    assert found.rank == 0 and not found.matrix.round(decimals=9).any()
    assert kept_projector(torch.zeros(2, 2).double(), RankRule(0.1)) is None


def test_a_smooth_spectrum_is_cut_between_its_values():
    matrix, turn = symmetric([(1 + i) ** -3.0 for i in range(200)])
    found = kept_projector(matrix, RankRule(4.6e-5))
    kept = turn[:, : found.rank]
    assert found.rank == 27
    assert (found.matrix - kept @ kept.mT).norm() < 1e-9


@pytest.mark.parametrize("unit", [1.0, 2.0**20, 2.0**-20])
def test_a_cut_off_far_below_what_is_found_is_one_too(unit):
    matrix = unit * symmetric([1.0, 0.5, 1e-14])[0]
    found = projector(matrix, low=1e-12 * unit, high=1e-12 * unit, bound=unit)
    assert found.rank == 2


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(0, 8), min_size=1, max_size=16),
    zeros=st.integers(0, 8),
    rtol=st.sampled_from([1e-6, 1e-4, 1e-2]),
    size=st.integers(-40, 40),
)
def test_a_pseudo_inverse_is_that_of_the_eigenproblem(values, zeros, rtol, size):
    sizes = [10.0**-value for value in values]
    matrix, _ = symmetric([2.0**size * own for own in [*sizes, *[0.0] * zeros]])
    kept = kept_projector(matrix, RankRule(rtol))
    known, vectors = kept_eigenpairs(matrix, RankRule(rtol))
    if kept is None:
        return
    assert kept.rank == len(known)
    assert (kept.matrix - vectors @ vectors.mT).norm() < 1e-8


def test_the_solver_is_told(slow_eigenproblems):
    rows = torch.ones(2, 8)
    for values, solver in (([1.0] * 4 + [0.0] * 4, "projector64"), ([1.0, 1e-3], "eigen64")):
        matrix, _ = symmetric([*values, *[0.0] * (8 - len(values))])
        solved, rank, taken = cut_off_right(matrix, rows, RankRule(1e-3))
        assert taken == solver
        values, vectors = kept_eigenpairs(matrix, RankRule(1e-3))
        expected = rows.double() @ vectors / values @ vectors.mT
        assert rank == len(values) and solved.dtype == rows.dtype
        assert torch.allclose(solved.double(), expected, rtol=1e-6, atol=1e-9)


def test_what_a_projector_lacks_of_one_is_nothing_beside_the_smallest_kept(slow_eigenproblems):
    """An eigenvalue that is hardly far enough from the cut-off, and a millionth of the largest."""
    rows = torch.randn(3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    taken = set()
    for above in torch.linspace(6e-8, 1.2e-7, 60).tolist():
        matrix, _ = symmetric([1.0] + [0.5] * 5 + [1e-6 + above] + [0.0] * 5)
        solved, rank, solver = cut_off_right(matrix, rows, RankRule(1e-6))
        values, vectors = kept_eigenpairs(matrix, RankRule(1e-6))
        assert rank == len(values) == 7
        assert relative(solved, rows @ vectors / values @ vectors.mT) < 1e-6
        taken.add(solver)
    assert taken == {"projector64", "eigen64"}


@pytest.mark.parametrize("tail", [1e-9, 1e-10, 1e-12])
def test_rounding_of_a_gram_matrix_decides_no_rank(tail):
    for seed in range(20):
        sigma = torch.linspace(1.0, 0.5, 8, dtype=torch.float64)
        sigma[-1] = tail
        matrix = (basis(8, 8, seed) * sigma) @ basis(8, 8, seed + 100)
        found = polar_by_products(matrix, RankRule(default(matrix), EXACT))
        assert found is None or found.k == 8


ASKING = ("tsv_m", "dc_merge", "iso_c", "iso_cts", "esm", "actmat", "wudi", "lot")
THESE = [pair for pair in VARIANTS if pair[0] in ASKING and pair[1].get("solver") != "adam"]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "params"), THESE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48, 32), (8, 96), (64, 64)])
def test_methods_by_products_are_near_their_references(
    name, params, shape, dtype, slow_eigenproblems
):
    updates = random_updates(*shape, 4, min(shape), 30.0, seed=11, dtype=dtype)
    merged, reference = both(name, updates, **params)
    assert merged.dtype == dtype
    assert relative(merged.double(), reference) < (1e-3 if dtype == torch.float32 else 1e-7)


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["tsv_m", "dc_merge", "iso_c", "actmat", "wudi"])
@pytest.mark.parametrize("kind", ["of rank 3", "copies", "opposite", "one unchanged"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_methods_of_low_rank_give_the_same_by_both_routes(name, kind, dtype, monkeypatch):
    updates = random_updates(24, 40, 3, 3 if kind == "of rank 3" else 24, 2.0, 5, dtype=dtype)
    if kind == "copies":
        updates = [updates[0]] * 3
    elif kind == "opposite":
        updates[1] = -updates[0]
    elif kind == "one unchanged":
        updates[1] = torch.zeros_like(updates[0])
    method = registry.get(name)
    found = []
    for products in (4.5, 1e6):
        monkeypatch.setitem(auto.EIGENPROBLEM, "cpu", products)
        found.append(method(group_of(method, updates), **method.resolve({})))
    by_pairs, by_products = found
    facts = [{k: v for k, v in one.stats.items() if isinstance(v, int | float)} for one in found]
    assert facts[1] == pytest.approx(facts[0], rel=1e-6)
    assert relative(by_products.delta, by_pairs.delta) < (1e-5 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize(
    ("name", "asked"), [("tsv_m", 2), ("dc_merge", 2), ("iso_c", 1), ("iso_cts", 2), ("esm", 2)]
)
def test_who_asks_for_a_polar_factor_is_told_by_products(name, asked, monkeypatch):
    answers = []

    def seen(*arguments, **known):
        answers.append(polar_by_products(*arguments, **known))
        return answers[-1]

    for module in (polar_rules, iso):
        monkeypatch.setattr(module, "polar_by_products", seen)
    updates = random_updates(24, 40, 3, 24, 2.0, 5, dtype=torch.float32)
    both(name, updates)
    assert not answers  # on a CPU
    monkeypatch.setitem(auto.EIGENPROBLEM, "cpu", 1e6)
    both(name, updates)
    assert len(answers) == asked and None not in answers


@pytest.mark.parametrize("name", ["actmat", "wudi"])
def test_a_cut_off_is_made_by_a_projector(name, slow_eigenproblems):
    method = registry.get(name)
    group = group_of(method, random_updates(24, 40, 3, 4, 2.0, 5, dtype=torch.float32))
    found = method(group, **method.resolve({}))
    assert found.stats["solver"] == "projector64" and found.stats["rank"] == 12


@pytest.mark.parametrize(
    ("shape", "many"), [((768, 768), True), ((768, 3072), True), ((64, 64), False)]
)
def test_the_routes_of_a_device(shape, many):
    """A CPU solves eigenproblems, CUDA multiplies what is not small, and an unknown device is as a CPU."""
    assert auto.polar_choice(*shape, 4).taken == "gram"
    assert (auto.polar_choice(*shape, 4, "cuda").taken == "products") == many
    assert auto.polar_choice(*shape, 4, "mps").taken == "gram"
    # In float64 by an SVD, which takes many times as long as an eigenproblem there.
    assert auto.polar_choice(*shape, 8).taken == "svd"
    assert (auto.polar_choice(*shape, 8, "cuda").taken == "products") == many
    assert auto.cut_off_choice(*shape).taken == "eigen64"
    assert (auto.cut_off_choice(*shape, "cuda").taken == "projector64") == many
    assert not goes_by_products(torch.zeros(shape))


@pytest.mark.parametrize("rank", [8, 96])
def test_no_more_memory_than_the_table_says(rank):
    matrix = of_spectrum(torch.ones(rank), 96, 96, torch.float32)
    peak = allocated(lambda: polar_by_products(matrix, RankRule(default(matrix))))
    assert peak < auto.polar_choice(96, 96, 4).routes["products"].workspace


def test_the_eigenproblem_after_all_is_as_it_was(slow_eigenproblems):
    matrix = of_spectrum(steps(1e12), 12, 12, torch.float32)
    found = polar(matrix, rtol=1e-9)
    expected = leading_directions(matrix, 12, rtol=1e-9)
    assert torch.equal(found.isometry, expected.isometry) and found.k == expected.k


def test_a_merge_by_products_in_any_order_and_size(slow_eigenproblems):
    updates = random_updates(24, 40, 3, 24, 2.0, 5, dtype=torch.float32)
    for name in ("tsv_m", "iso_c", "iso_cts", "actmat"):
        exact = merge_layer([update.double() for update in updates], name)
        for these, factor in ((updates[::-1], 1.0), ([4 * own for own in updates], 4.0)):
            merged = merge_layer(these, name).double()
            assert (merged - factor * exact).norm() < 1e-5 * factor * exact.norm()
