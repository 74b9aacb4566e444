"""Products by strips, and the factorisation by column blocks, against torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.maths.linalg.cholesky import factorize, factorize_above
from covmerge.maths.linalg.symmetric import add_gram_, gram, half, mirror_, times_lower


def matrix(m, n, dtype=torch.float64):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(m + n), dtype=dtype)


# Sizes on both sides of one strip, and of an even division into strips.
sizes = st.sampled_from([1, 2, 127, 128, 129, 300, 769])


@settings(max_examples=25, deadline=None)
@given(m=st.sampled_from([1, 5, 200]), n=sizes)
def test_a_gram_matrix(m, n):
    rows = matrix(m, n)
    found = gram(rows)
    assert torch.allclose(found, rows.T @ rows)
    assert torch.allclose(found, found.T, rtol=0, atol=1e-12 * m)


def test_grams_add_up():
    first, second = matrix(4, 300), matrix(7, 300)
    total = torch.zeros(300, 300, dtype=torch.float64)
    add_gram_(total, first, 2.0)
    mirror_(add_gram_(total, second))
    assert torch.allclose(total, 2.0 * first.T @ first + second.T @ second)


def test_a_gram_of_transposed_rows():
    rows = matrix(300, 40)
    assert torch.allclose(gram(rows.mT), rows @ rows.T)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 700])
def test_a_factor_by_blocks_is_lapacks(n):
    rows = matrix(n + 5, n)
    system = rows.T @ rows
    found = factorize(system.clone(), ridge=0.5)
    wanted = torch.linalg.cholesky(system + 0.5 * torch.eye(n, dtype=torch.float64))
    assert torch.allclose(found.factor.tril(), wanted)


@pytest.mark.parametrize("place", [0, 300, 699])
def test_a_breakdown_in_any_block_is_seen(place):
    system = torch.eye(700, dtype=torch.float64)
    system[place, place] = -1.0
    assert factorize_above(system, floor=0.0) is None


@pytest.mark.parametrize("n", [3, 300, 600])
def test_eigenvalues_above_a_floor_are_told(n):
    q, _ = torch.linalg.qr(matrix(n, n))
    system = (q * torch.linspace(1.0, 2.0, n, dtype=torch.float64)) @ q.T
    assert factorize_above(system, floor=0.999) is not None
    assert factorize_above(system, floor=1.001) is None


@settings(max_examples=10, deadline=None)
@given(m=st.sampled_from([1, 5]), n=sizes)
def test_half_of_a_symmetric_matrix_and_products_with_it(m, n):
    symmetric, rows = gram(matrix(4, n)), matrix(m, n)
    lower = half(symmetric)
    assert torch.allclose(lower + lower.T, symmetric)
    assert torch.allclose(times_lower(rows, lower), rows @ lower)
