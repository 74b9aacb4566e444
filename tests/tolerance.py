"""What rounding alone may change, whatever the processor, its kernels and the number of threads."""

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
# Inputs of a layer are results themselves, of as many roundings as there are layers before it. Two
# evaluations of the networks in these tests, by unlike kernels or in unlike batches, agree to a
# few eps of an input's size (5 at most were seen): a wrong row, mask or dtype is thousands.
ACTIVATIONS = 32


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
