"""Leading pairs and triplets by refinement, against all of them in float64."""

import pytest
import torch

from covmerge import merge_layer
from covmerge.base.types import Rounding
from covmerge.maths.linalg import auto
from covmerge.maths.linalg.polar import orthogonalized
from covmerge.maths.linalg.refined import leading_pairs
from covmerge.maths.linalg.spectral import (
    RankRule,
    leading_svd,
    rank_tolerance,
    truncated_svd,
    with_equals,
)

SIDE = 264  # no smaller matrix is refined


def rows(m, n, seed=1):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_spectrum(sigma, d_out=SIDE, d_in=SIDE):
    left, right = (torch.linalg.qr(rows(d, len(sigma), d)).Q for d in (d_out, d_in))
    return ((left * torch.as_tensor(sigma, dtype=torch.float64)) @ right.mT).float()


def gram_of(matrix):
    return matrix.double() @ matrix.double().mT


STEPS = torch.arange(1.0, SIDE + 1, dtype=torch.float64)
SPECTRA = {
    "random": rows(SIDE, SIDE).float(),
    "wide": rows(SIDE, 3 * SIDE).float(),
    "1/i": of_spectrum(1 / STEPS),
    "1/√i": of_spectrum(STEPS**-0.5),
    "of low rank and noise": of_spectrum(torch.where(STEPS < 17, 30.0, 1.0) * (2 - STEPS / SIDE)),
    "falls off a cliff": of_spectrum(torch.where(STEPS < 60, 1.0, 1e-3) / STEPS),
    "near to a tie": of_spectrum(torch.where(STEPS < 31, 2.0, 2.0 - 4e-5) - 1e-3 * STEPS),
}


def naive(gram, k):
    """All eigenpairs in float64, the first k."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0)[:k], vectors.flip(1)[:, :k]


@pytest.mark.parametrize("k", [1, 6, 30])
@pytest.mark.parametrize("name", SPECTRA)
def test_pairs_are_those_of_the_whole_problem(name, k):
    gram = gram_of(SPECTRA[name])
    pairs = leading_pairs(gram, k)
    values, vectors = naive(gram, k)
    assert torch.allclose(pairs.values[:k], values, rtol=1e-12)
    missing = vectors - pairs.vectors @ (pairs.vectors.mT @ vectors)
    assert missing.norm(dim=0).max() < 3e-7
    assert torch.allclose(pairs.vectors.mT @ pairs.vectors, torch.eye(k).double(), atol=1e-7)
    assert pairs.least <= torch.linalg.eigvalsh(gram)[0]
    # What is asked of the directions one by one: the part of G that they are.
    part, whole = ((v * s) @ v.mT for v, s in ((pairs.vectors, values), (vectors, values)))
    assert (part - whole).norm() < 1e-7 * gram.norm()


@pytest.mark.parametrize("name", SPECTRA)
def test_no_eigenvalue_is_missed(name):
    """By inertia: below the last, less a little, sI − (G − VΘVᵀ) has a Cholesky factor."""
    gram = gram_of(SPECTRA[name])
    pairs = leading_pairs(gram, 12)
    theta = pairs.values[:12]
    rest = (pairs.vectors * theta) @ pairs.vectors.mT - gram
    rest.diagonal().add_(float(theta[-1]) * (1 - 1e-9))
    assert not int(torch.linalg.cholesky_ex(rest).info)


@pytest.mark.parametrize(
    "gram",
    [
        torch.zeros(40, 40),
        torch.ones(1, 1),
        torch.eye(12),  # no room beside
        torch.diag(torch.arange(14.0, 0.0, -1.0)),  # none but what is refined
        torch.diag(
            torch.tensor([2.0] * 9 + [1.0] * 71)
        ),  # a tie at the cut, which nothing asks for
        torch.eye(80),  # equals go on beyond what is refined
        torch.diag(torch.tensor([1.0] * 3 + [0.0] * 77)),  # of a lower rank than k
        torch.diag(torch.cat([torch.ones(2), 1e-9 * torch.arange(78.0, 0, -1)])),  # below float32
        torch.diag(torch.cat([torch.ones(1), 1e-9 * torch.arange(79.0, 0, -1)])),
    ],
    ids=["zero", "1 × 1", "tiny", "no rest", "tie", "flat", "rank 3", "steep", "steeper"],
)
def test_what_float32_cannot_tell_is_left_to_the_whole_problem(gram):
    assert leading_pairs(gram.double(), 5) is None


def test_what_the_values_say_is_kept():
    sigma = torch.linspace(2, 1, SIDE, dtype=torch.float64)
    sigma[7:11] = sigma[7]
    gram = gram_of(of_spectrum(sigma))
    pairs = leading_pairs(gram, 9, lambda values: with_equals(values.sqrt(), 9))
    assert pairs.vectors.shape == (SIDE, 11)
    vectors = naive(gram, 11)[1]
    assert (vectors - pairs.vectors @ (pairs.vectors.mT @ vectors)).norm() < 1e-6


@pytest.mark.parametrize("shape", [(SIDE, SIDE), (SIDE, 400), (400, SIDE)])
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_triplets_are_those_of_truncated_svd(shape, decay):
    matrix = of_spectrum((1.0 + 1 / STEPS) * STEPS**-decay, *shape)
    rule = RankRule(rank_tolerance(shape, torch.float32, None))
    found, whole = (take(matrix, 20, rule) for take in (leading_svd, truncated_svd))
    assert 20 < len(found.sigma) < SIDE == len(whole.sigma)  # refined
    assert found.rank > len(found.leading) == len(whole.leading) == 20
    assert torch.allclose(found.leading, whole.leading, rtol=1e-10)
    assert (found.floor, found.edge) == pytest.approx((whole.floor, whole.edge), rel=1e-10)
    assert (found.product() - whole.product()).norm() < 2e-7 * whole.product().norm()


def test_a_power_of_two_a_sign_and_threads_change_nothing():
    matrix = SPECTRA["1/√i"]
    found = leading_svd(matrix, 12, RankRule(1e-6))
    large, mirrored = (leading_svd(f * matrix, 12, RankRule(1e-6)) for f in (2.0**40, -1.0))
    assert torch.equal(large.left, found.left)
    assert torch.equal(large.right, found.right)
    assert torch.equal(large.leading, found.leading * 2.0**40)
    assert torch.equal(mirrored.left, found.left)
    assert torch.equal(mirrored.right, -found.right)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        other = leading_svd(matrix, 12, RankRule(1e-6))
    finally:
        torch.set_num_threads(threads)
    assert (other.product() - found.product()).norm() < 1e-7 * found.product().norm()


SMALLEST = 0.05  # of the spectrum below


@pytest.mark.parametrize("least", [SMALLEST, 0.0])
@pytest.mark.parametrize("edge", [1e-6, 1e-4, 0.01, 0.2])
def test_the_end_of_the_rank_is_that_of_all_values(edge, least):
    """An edge below all values, among them, where float32 was stored, and one of half precision."""
    sigma = torch.linspace(10.0, SMALLEST, SIDE, dtype=torch.float64)
    sigma[-3:] = least
    matrix = of_spectrum(sigma)
    for energy in (1e-30, 1e30):  # what is below is the matrix's own, or rounding
        rule = RankRule(1e-5, Rounding(edge, energy))
        found, whole = (take(matrix, 16, rule) for take in (leading_svd, truncated_svd))
        assert (found.floor, found.edge) == pytest.approx((whole.floor, whole.edge), rel=1e-10)
        assert torch.allclose(found.leading, whole.leading, rtol=1e-9)


@pytest.mark.parametrize("shape", [(1, 400), (400, 1), (3, 300), (300, 300)])
def test_matrices_without_a_spectrum_to_refine(shape):
    assert leading_svd(torch.zeros(shape), 5, RankRule(1e-6)).rank == 0
    matrix = rows(shape[0], 1) @ rows(1, shape[1], 2)
    found = leading_svd(matrix.float(), 5, RankRule(1e-5))
    assert found.rank == len(found.leading) == 1
    assert (found.product() - matrix).norm() < 1e-6 * matrix.norm()


@pytest.mark.parametrize(
    ("shape", "k", "itemsize", "taken"),
    [
        ((768, 3072), 96, 4, "refined"),
        ((768, 768), 19, 4, "refined"),
        ((768, 768), 384, 4, "gram"),
        ((768, 768), 768, 4, "gram"),
        ((128, 768), 4, 4, "gram"),
        ((768, 768), 19, 8, "svd"),
    ],
)
def test_the_route_of_a_part_of_a_spectrum(shape, k, itemsize, taken):
    choice = auto.leading_choice(*shape, k, itemsize)
    assert choice.taken == taken
    assert choice.cost.workspace == auto.spectrum_choice(*shape, k, itemsize).cost.workspace


@pytest.mark.parametrize("framed", [True, False])
def test_a_part_apart_is_a_block_of_its_own(framed):
    """As when all are decomposed together; a weak direction does not turn into the part apart."""
    basis, _ = torch.linalg.qr(rows(40, 40))
    common, frame = basis[:, :28].float(), basis[:, 28:].float()
    whole = truncated_svd(common @ rows(28, 60, 2).float(), 28, RankRule(1e-6))
    parts = [
        truncated_svd(frame.mT @ rows(40, 60, seed).float(), 6, RankRule(1e-6)) for seed in (3, 4)
    ]
    outer = [
        truncated_svd(frame @ (frame.mT @ rows(40, 60, seed).float()), 6, RankRule(1e-6))
        for seed in (3, 4)
    ]
    together = orthogonalized([*outer, whole], rtol=1e-6)
    own = parts if framed else outer
    apart = orthogonalized(own, rtol=1e-6, apart=whole, frame=frame if framed else None)
    assert apart.dependent == together.dependent == 0
    products = [each.left @ each.right for each in (apart, together)]
    assert (products[0] - products[1]).norm() < 2e-6 * products[1].norm()
    assert (apart.left[:, :12].mT @ whole.left).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (SIDE, 280)) for name in ("tsv_m", "dc_merge", "cart", "resmerge", "iso_cts")),
        ("iso_cts", (280, SIDE)),
    ],
)
def test_methods_on_layers_that_are_refined(name, shape):
    """In any order, and at any size, they give what float64 does."""
    updates = [
        of_spectrum(0.1 * STEPS**-0.5, *shape) @ (torch.eye(shape[1]) + 0.02 * noise.float())
        for noise in (rows(shape[1], shape[1], seed) for seed in range(8))
    ]
    exact = merge_layer([update.double() for update in updates], name)
    for given, factor in ((updates, 1.0), (updates[::-1], 1.0), ([4 * u for u in updates], 4.0)):
        merged = merge_layer(given, name)
        assert (merged - factor * exact).norm() < 1e-5 * factor * exact.norm()


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("scale", [2.0**-200, 2.0**150])
def test_a_scale_that_float32_does_not_have_changes_nothing(name, scale):
    """Nothing that is measured on the way has a unit: as many corrections, and the same vectors."""
    gram = gram_of(SPECTRA[name])
    found, scaled = leading_pairs(gram, 6), leading_pairs(gram * scale, 6)
    assert torch.equal(scaled.vectors, found.vectors)
    assert torch.equal(scaled.values, found.values * scale)
    assert scaled.least == found.least * scale


@pytest.mark.parametrize("kept", [0, -1])
def test_a_cut_before_or_behind_all_that_is_refined_is_no_answer(kept):
    gram = gram_of(SPECTRA["1/i"])
    assert leading_pairs(gram, 6, lambda values: kept % (len(values) + 1)) is None
