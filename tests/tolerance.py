"""What rounding alone may change, whatever the processor, its kernels and the number of threads.

The rule for all tests: bits that another machine made are compared with bits only where every operation
between is elementwise and correctly rounded (add, multiply, divide, compare, cast). All else, sums,
products of matrices, logarithms and `torch.randn` among it, is compared with a tolerance of this
module, or with what the same run made. `python -m tests.processors` shows that it holds.
"""

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
# Inputs of a layer are results themselves, of as many roundings as there are layers before it. Two
# evaluations of the networks in these tests, by unlike kernels or in unlike batches, agree to a
# few eps of an input's size (5 at most were seen): a wrong row, mask or dtype is thousands.
ACTIVATIONS = 32
OPERATIONS = 8


def assert_same_gram(actual: Tensor, expected: Tensor, rows: int) -> None:
    """Compare a mean of z zᵀ over `rows` inputs, summed in float32, with its definition.

    A sum of n products, in any order, is off by at most n · eps/2 of the sum of their magnitudes
    (Higham, Accuracy and Stability, §3.1); of entry (i, j) these have a mean of √(G_ii G_jj) at most,
    by Cauchy and Schwarz, however far the terms cancel; and storing the result is one rounding more.
    An input that is off by δ adds δ(√G_ii + √G_jj) + δ².
    """
    expected = expected.double()
    size = expected.diagonal().sqrt()
    of_sum = (rows + 1) * EPS / 2 * size.outer(size)
    off = ACTIVATIONS * EPS * size.square().mean().sqrt()
    allowed = of_sum + off * (size[:, None] + size + off)
    beyond = (actual.double() - expected).abs() - allowed
    assert beyond.max() <= 0, f"{int((beyond > 0).sum())} entries, by {float(beyond.max()):.1e}"


def assert_same_fisher(actual: Tensor, expected: Tensor, largest: float) -> None:
    """Compare a mean of squared float32 gradients with its definition.

    Args:
        actual: of one tensor.
        expected: its definition.
        largest: of the whole model. A gradient is a sum of what flows back through all of it, so
            one that cancels, to nothing in a bias of keys, is off by roundings of the largest.

    A gradient g that is off by δ has a square that is off by 2δ|g| + δ²; then it is stored.
    """
    expected = expected.double()
    off = 2 * ACTIVATIONS * EPS * largest**0.5  # on the way there, and on the way back
    allowed = EPS * expected + 2 * off * expected.sqrt() + off**2
    beyond = (actual.double() - expected).abs() - allowed
    assert beyond.max() <= 0, f"{int((beyond > 0).sum())} entries, by {float(beyond.max()):.1e}"


def assert_rounded_alike(
    actual: Tensor, expected: Tensor, arithmetic: torch.dtype, terms: int
) -> None:
    """Compare results whose factors come of sums over a tensor, made on different machines.

    Args:
        actual: of this machine.
        expected: of another.
        arithmetic: the dtype that each operation rounds to.
        terms: of the longest sum. Of n terms a sum in any order is off by √n roundings, with a
            probability that leaves no exceptions (Higham and Mary, 2019); torch adds up half precision
            in float32.

    Entries are about 1. `OPERATIONS` elementwise ones come before and after a sum, each a rounding.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (arithmetic, expected.dtype))
    summed = min(eps, EPS)
    allowed = (OPERATIONS * eps + terms**0.5 * summed) / 2 * (1 + expected.double().abs())
    beyond = (actual.double() - expected.double()).abs() - allowed
    assert beyond.max() <= 0, f"{int((beyond > 0).sum())} entries, by {float(beyond.max()):.1e}"


def of_factorised(shape: torch.Size) -> float:
    """Return by how much of its norm a float32 result of factorisations may be off.

    The singular value decomposition of an m × n matrix is that of another, which differs by p(m, n) eps of
    its norm (LAPACK Users' Guide, §4.9). p grows modestly with the size, and is taken to be √(mn).
    `OPERATIONS` such steps follow one another.
    """
    return OPERATIONS * shape.numel() ** 0.5 * EPS


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm())
