"""Solvers and factorisations against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.errors import TensorError
from covmerge.maths.linalg.cholesky import add_rank_one_, factorize, factorize_above
from covmerge.maths.linalg.lapack import lengths
from covmerge.maths.linalg.pinv import pinv_right
from covmerge.maths.linalg.spectral import RankRule, has_above, leading_directions


def spd(n, seed=0, dtype=torch.float64):
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (root @ root.T / n).to(dtype)


def rows(m, n, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=generator, dtype=torch.float64).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    n=st.one_of(st.integers(1, 30), st.sampled_from([256, 300, 520])),
    m=st.integers(1, 30),
    ridge=st.sampled_from([1e-3, 1.0]),
)
def test_cholesky_solves_the_system(n, m, ridge):
    system, right = spd(n), rows(m, n)
    factor = factorize(system.clone(), ridge=ridge)
    solution = factor.solve_right(right)
    assert torch.allclose(
        solution @ (system + ridge * torch.eye(n, dtype=torch.float64)), right, atol=1e-8
    )
    assert factor.jitter == 0.0


def test_a_float32_breakdown_is_repeated_in_float64():
    system = torch.diag(torch.tensor([1.0, 1e-30, 0.0]))
    factor = factorize(system, ridge=0.0)
    assert factor.factor.dtype == torch.float64
    assert factor.jitter > 0
    assert factor.solve_right(rows(2, 3, dtype=torch.float32)).dtype == torch.float32


def test_what_a_breakdown_overwrote_is_found_above_the_diagonal():
    """The second block breaks down in float32, and the third was not seen yet."""
    system = spd(600) + 0.1 * torch.eye(600, dtype=torch.float64)
    system[400] = system[:, 400] = 0.0
    single = system.float()
    factor = factorize(single.clone(), ridge=0.0)
    assert factor.factor.dtype == torch.float64 and factor.jitter > 0.0
    whole = single.double()
    whole.diagonal().add_(factor.jitter)
    lower = factor.factor.tril()
    assert torch.allclose(lower @ lower.mT, whole, atol=1e-10)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (30, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_above_a_floor_are_counted(shape, dtype):
    left, sigma = torch.linalg.qr(rows(shape[0], 20)).Q, 2.0 ** -torch.arange(20.0)
    matrix = ((left * sigma) @ torch.linalg.qr(rows(shape[1], 20, 2)).Q.mT).to(dtype)
    for count in (1, 10, 11, 20, 24, 30):
        assert has_above(matrix, count, 0.75 * 2.0**-9) == (count <= 10)
    # The first rows have fewer directions than all have.
    matrix[1:4] = matrix[0]
    kept = int((torch.linalg.svdvals(matrix) > 1e-4).sum())
    assert has_above(matrix, kept, 1e-4) and not has_above(matrix, kept + 1, 1e-4)


def test_an_indefinite_system_is_refused():
    with pytest.raises(TensorError, match=r"stays indefinite.*raise `eps`"):
        factorize(-torch.eye(3), ridge=0.0)


def test_pinv_is_the_pseudo_inverse_at_its_cut_off():
    system = spd(8)[:, :5] @ spd(8)[:5, :]
    system = system @ system.T
    solution, rank = pinv_right(system, rows(3, 8), RankRule(1e-9))
    assert rank == 5
    expected = rows(3, 8) @ torch.linalg.pinv(system, rtol=1e-9, hermitian=True)
    assert torch.allclose(solution, expected, rtol=1e-6)


def test_pinv_of_zero_is_zero():
    solution, rank = pinv_right(torch.zeros(3, 3), torch.ones(2, 3), RankRule(1e-6))
    assert rank == 0
    assert not solution.any()


def test_rank_one_update_is_sherman_morrison():
    system, numerator, c = spd(6) + torch.eye(6), rows(4, 6), rows(1, 6, seed=2).abs()[0]
    inverse = torch.linalg.inv(system)
    updated = add_rank_one_(numerator @ inverse, c @ inverse)
    direct = numerator @ torch.linalg.inv(system + torch.ones_like(c).outer(c))
    assert torch.allclose(updated, direct)


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9)])
def test_both_spectral_routes_agree(shape):
    matrix = rows(*shape)
    exact = leading_directions(matrix, 3, rtol=1e-12)
    left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.allclose(exact.isometry, left[:, :3] @ right[:3])
    single = leading_directions(matrix.float(), 3, rtol=1e-6)
    assert torch.allclose(single.isometry.double(), exact.isometry, atol=1e-5)
    assert torch.allclose(single.sigma, sigma, rtol=1e-5)


def test_directions_beyond_the_rank_are_not_kept():
    matrix = (rows(20, 4) @ rows(4, 30)).float()
    top = leading_directions(matrix, 10, rtol=30 * torch.finfo(torch.float32).eps)
    assert top.k == top.rank == 4


def test_what_is_factorised_as_it_is_needs_no_jitter():
    assert factorize_above(spd(5) + torch.eye(5), floor=0.5).jitter == 0.0


def test_lengths_of_rows_whose_squares_leave_the_dtype_on_both_sides():
    found = lengths(torch.tensor([[3e30, 4e30], [3e-30, 4e-30]]), axis=1)
    assert found.tolist() == pytest.approx([5e30, 5e-30], rel=1e-6)
