"""Truncated singular value decompositions and polar factors against their definitions."""

import pytest
import torch

from covmerge.maths.linalg.polar import orthogonalized, polar
from covmerge.maths.linalg.spectral import (
    RankRule,
    leading_directions,
    leading_svd,
    rank_tolerance,
    residual,
    truncated_svd,
)
from tests.linalg.test_linalg import rows


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9), (1, 5), (5, 1), (3, 2500)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_the_leading_part_is_that_of_the_svd(shape, dtype, tolerance):
    matrix = rows(*shape, dtype=dtype)
    k = min(3, *shape)
    top = truncated_svd(matrix, k, RankRule(1e-6))
    left, sigma, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    assert top.left.dtype == top.right.dtype == dtype
    assert top.sigma.dtype == torch.float64
    assert torch.allclose(top.sigma, sigma, rtol=tolerance)
    expected = left[:, :k] @ torch.diag(sigma[:k]) @ right[:k]
    part = top.left.double() @ torch.diag(top.leading) @ top.right.double()
    assert (part - expected).norm() <= tolerance * expected.norm()
    for basis in (top.left.mT, top.right):
        gram = basis.double() @ basis.double().mT
        assert torch.allclose(gram, torch.eye(k, dtype=torch.float64), atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_beyond_the_rank(dtype):
    matrix = (rows(20, 4) @ rows(4, 30)).to(dtype)
    top = truncated_svd(matrix, 10, RankRule(rank_tolerance(matrix.shape, matrix.dtype, None)))
    assert top.rank == len(top.leading) == 4
    assert top.left.shape == (20, 4)
    assert top.first(2).right.shape == (2, 30)
    assert truncated_svd(torch.zeros(3, 5, dtype=dtype), 2, RankRule(1e-6)).rank == 0


def test_the_cut_off_may_be_relative_to_another_matrix():
    matrix = torch.diag(torch.tensor([1.0, 0.1]))
    assert truncated_svd(matrix, 2, RankRule(1e-2)).rank == 2
    assert leading_svd(matrix, 2, RankRule(1e-2, scale=20.0)).rank == 1
    assert leading_svd(matrix, 2, RankRule(1e-2, scale=200.0)).rank == 0


def test_the_tolerance_given_is_taken():
    assert rank_tolerance((3, 50), torch.float32, 0.5) == 0.5
    assert rank_tolerance((3, 50), torch.float32, None) == 50**0.5 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_polar_factor_is_the_nearest_isometry(shape, dtype, tolerance):
    matrix = rows(*shape, dtype=dtype)
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    assert torch.allclose(polar(matrix, rtol=1e-6).isometry.double(), left @ right, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dependent_columns_gain_no_direction(dtype):
    vector = torch.nn.functional.normalize(rows(9, 1, dtype=dtype), dim=0)
    copies = polar(vector.expand(9, 4), rtol=1e-5).isometry
    assert torch.allclose(copies, vector.expand(9, 4) / 2, atol=1e-6)


def test_opposite_vectors_cancel_in_the_product():
    top = truncated_svd(rows(6, 8), 2, RankRule(1e-12))
    mirrored = truncated_svd(-rows(6, 8), 2, RankRule(1e-12))
    joined = orthogonalized([top, mirrored], rtol=1e-12)
    left, right = joined.left, joined.right
    assert (left @ right).norm() < 1e-12


def spectrum(d_out, d_in, smallest):
    """A float32 matrix whose singular values fall evenly to `smallest`."""
    k = min(d_out, d_in)
    left, right = (torch.linalg.qr(rows(d, k, seed=d)).Q for d in (d_out, d_in))
    return (left * torch.logspace(0, torch.tensor(smallest).log10(), k) @ right.mT).float()


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (40, 40)])
def test_the_residual_of_an_isometry_is_checked(shape):
    # Below 1e-8 of the largest the eigenproblem of a Gram matrix has nothing to say.
    matrix = spectrum(*shape, smallest=1e-9)
    assert residual(truncated_svd(matrix, min(shape), RankRule(0.0))) > 0.1
    found = leading_directions(matrix, min(shape), rtol=0.0)
    assert found.k == min(shape)
    assert found.isometry.dtype == torch.float32
    small = found.isometry.double() if shape[0] <= shape[1] else found.isometry.double().mT
    assert torch.allclose(small @ small.mT, torch.eye(min(shape)).double(), atol=1e-5)
    assert torch.allclose(found.sigma, torch.linalg.svdvals(matrix.double()), atol=1e-14)


@pytest.mark.parametrize("shape", [(96, 300), (300, 96), (128, 128)])
def test_at_the_default_rank_the_residual_is_small(shape):
    rtol = rank_tolerance(shape, torch.float32, None)
    matrix = spectrum(*shape, smallest=1.5 * rtol)
    assert residual(truncated_svd(matrix, min(shape), RankRule(rtol))) < 1e-4
