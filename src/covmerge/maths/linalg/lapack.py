"""Typed wrappers of torch.linalg, which has no types, and norms that do not overflow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import frexp, isfinite
from typing import Any, cast

import torch
from torch import Tensor

# Powers of two: multiplying a binary floating-point number by one changes no digit.

_LIMITS = {torch.float32: 120, torch.float64: 1000}


def exponent_of(tensors: Iterable[Tensor]) -> int:
    """Return the least e with |v| < 2^e for all entries; 0 if all of them are zero.

    Tensors with NaN or Inf do not count. e is limited so that 2^e and 2^-e fit the dtype. Larger entries
    scaled by 2^-e come near 1, not below it.

    Example:
        >>> exponent_of([torch.tensor([0.0, -6.0]), torch.tensor([1.0])])
        3
    """
    exponent: int | None = None
    for tensor in tensors:
        low, high = (float(end) for end in torch.aminmax(tensor)) if tensor.numel() else (0.0, 0.0)
        largest = max(-low, high)
        if largest > 0.0 and isfinite(largest):
            limit = _LIMITS[tensor.dtype]
            e = max(-limit, min(limit, frexp(largest)[1]))
            exponent = e if exponent is None else max(exponent, e)
    return exponent or 0


_linalg: Any = torch.linalg
LinAlgError: type[RuntimeError] = _linalg.LinAlgError
_FLOATS = (torch.float32, torch.float64)
_EASY = (1e-15, 1e15)  # norms whose squares are well within float32


def norm(tensor: Tensor) -> float:
    """Return the Frobenius norm of a tensor of any shape, without overflow or underflow of the squares.

    Example:
        >>> round(norm(torch.tensor([3e30, 4e30])) / 1e30, 6)
        5.0
    """
    size = float(_linalg.vector_norm(tensor))
    if _EASY[0] < size < _EASY[1] or not tensor.numel() or tensor.dtype not in _FLOATS:
        return size
    # A zero tensor, as of an update that changes nothing: the sum of the magnitudes does not underflow.
    if not size and not float(_linalg.vector_norm(tensor, 1)):
        return 0.0
    exponent = exponent_of([tensor])
    near_one = tensor.to(torch.float64) * 2.0**-exponent
    return float(_linalg.vector_norm(near_one)) * 2.0**exponent


def square_norm(tensor: Tensor) -> float:
    """Return ‖·‖²_F; inf if it is beyond the range of a float.

    Example:
        >>> square_norm(torch.tensor([3.0, 4.0])), square_norm(torch.tensor([1e200]).double())
        (25.0, inf)
    """
    size = norm(tensor)
    return size * size  # a power would raise OverflowError


def lengths(tensor: Tensor, axis: int | None = None, *, keep: bool = False) -> Tensor:
    """Return Euclidean norms along an axis, or of the whole tensor, as a tensor of its dtype.

    Squares of entries may leave the dtype, except in half precision, whose range the caller has to check.

    Raises:
        OverflowError: a norm itself leaves the dtype.

    Example:
        >>> lengths(torch.tensor([[3.0, 4.0], [3e30, 4e30]]), axis=1).tolist()
        [5.0, 4.9999999241216036e+30]
    """
    found = cast("Tensor", _linalg.vector_norm(tensor, dim=axis, keepdim=keep))
    if tensor.dtype not in _FLOATS or not tensor.numel():
        return found
    easy = (found > _EASY[0]) & (found < _EASY[1])
    if bool(easy.all()):
        return found
    line, along = (tensor.reshape(-1), 0) if axis is None else (tensor, axis)
    exponents = torch.frexp(line.abs().amax(dim=along, keepdim=True)).exponent.clamp(-120, 120)
    near_one = torch.ldexp(line, -exponents)
    sizes = _linalg.vector_norm(near_one, dim=along, keepdim=True)
    sized = torch.ldexp(sizes, exponents).view(found.shape)
    if not bool(torch.isfinite(sized).all()) and bool(torch.isfinite(tensor).all()):
        raise OverflowError(f"a length beyond {tensor.dtype}")
    return torch.where(easy, found, sized)


def dot(one: Tensor, other: Tensor) -> float:
    """Return the sum of the products of two tensors' elements; computed in float64 if float32 overflows."""
    found = float(torch.dot(one.reshape(-1), other.reshape(-1)))
    if isfinite(found):
        return found
    return float(torch.dot(one.reshape(-1).double(), other.reshape(-1).double()))


def eigh(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, ascending, and the eigenvectors as columns."""
    return cast("tuple[Tensor, Tensor]", _linalg.eigh(symmetric))


def eigvalsh(symmetric: Tensor) -> Tensor:
    """Return the eigenvalues, ascending."""
    return cast("Tensor", _linalg.eigvalsh(symmetric))


def svdvals(matrix: Tensor) -> Tensor:
    """Return the singular values, descending."""
    return cast("Tensor", _linalg.svdvals(matrix))


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition U, σ, Vᵀ."""
    return cast("tuple[Tensor, Tensor, Tensor]", _linalg.svd(matrix, full_matrices=False))


def qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the thin QR factorisation."""
    return cast("tuple[Tensor, Tensor]", _linalg.qr(matrix))


def cholesky(matrix: Tensor) -> Tensor | None:
    """Return the lower Cholesky factor of a symmetric matrix; None if it is not positive definite."""
    factor, failed = cast("tuple[Tensor, Tensor]", _linalg.cholesky_ex(matrix))
    return None if int(failed) else factor


def solve_triangular(lower: Tensor, columns: Tensor) -> Tensor:
    """Return L⁻¹ · columns for a lower triangular L."""
    return cast("Tensor", _linalg.solve_triangular(lower, columns, upper=False))


def divide_triangular(rows: Tensor, lower: Tensor) -> Tensor:
    """Return rows · L⁻¹ for a lower triangular L."""
    return cast("Tensor", _linalg.solve_triangular(lower, rows, upper=False, left=False))


def multi_dot(matrices: Sequence[Tensor]) -> Tensor:
    """Return the product of matrices, in the cheapest order."""
    return cast("Tensor", _linalg.multi_dot(matrices))
