"""torch.linalg with types, which it does not carry, in the few forms used here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import frexp, isfinite
from typing import Any, cast

import torch
from torch import Tensor

# Powers of two: the factors that change no digit of a binary floating-point number.

_LIMITS = {torch.float32: 120, torch.float64: 1000}


def exponent_of(tensors: Iterable[Tensor]) -> int:
    """Return the least e with |v| < 2^e for all entries, 0 where they are all zero, NaN or Inf.

    At most what 2^e and 2^-e can be in the dtype: tensors of entries beyond that come near 1, not to it.

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
_EASY = (1e-15, 1e15)  # norms whose squares are far inside float32


def norm(tensor: Tensor) -> float:
    """Frobenius norm of a tensor of any shape, also where the squares of its entries leave its dtype.

    Example:
        >>> round(norm(torch.tensor([3e30, 4e30])) / 1e30, 6)
        5.0
    """
    size = float(_linalg.vector_norm(tensor))
    if _EASY[0] < size < _EASY[1] or not tensor.numel() or tensor.dtype not in _FLOATS:
        return size
    # Zero, as of a tensor that an expert left as it was: the ends tell in a fifth of the time of `any`.
    if not size and not any(map(bool, torch.aminmax(tensor))):
        return 0.0
    exponent = exponent_of([tensor])
    near_one = tensor.to(torch.float64) * 2.0**-exponent
    return float(_linalg.vector_norm(near_one)) * 2.0**exponent


def square_norm(tensor: Tensor) -> float:
    """‖·‖²_F; inf where no number of Python's is as large.

    Example:
        >>> square_norm(torch.tensor([3.0, 4.0])), square_norm(torch.tensor([1e200]).double())
        (25.0, inf)
    """
    size = norm(tensor)
    return size * size  # a power would raise OverflowError


def lengths(tensor: Tensor, axis: int | None = None, *, keep: bool = False) -> Tensor:
    """Euclidean lengths along an axis, or of all of it, as a tensor of its dtype.

    Also where the squares of entries leave the dtype, but for half precision, whose range is the caller's
    matter.

    Raises:
        OverflowError: a length itself leaves the dtype.

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
    """Sum of the products of two tensors' elements; in float64 where float32 overflows."""
    found = float(torch.dot(one.reshape(-1), other.reshape(-1)))
    if isfinite(found):
        return found
    return float(torch.dot(one.reshape(-1).double(), other.reshape(-1).double()))


def eigh(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors in columns."""
    return cast("tuple[Tensor, Tensor]", _linalg.eigh(symmetric))


def eigvalsh(symmetric: Tensor) -> Tensor:
    """Eigenvalues, ascending."""
    return cast("Tensor", _linalg.eigvalsh(symmetric))


def svdvals(matrix: Tensor) -> Tensor:
    """Singular values, descending."""
    return cast("Tensor", _linalg.svdvals(matrix))


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin singular value decomposition U, σ, Vᵀ."""
    return cast("tuple[Tensor, Tensor, Tensor]", _linalg.svd(matrix, full_matrices=False))


def qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Thin QR factorisation."""
    return cast("tuple[Tensor, Tensor]", _linalg.qr(matrix))


def cholesky(matrix: Tensor) -> Tensor | None:
    """Lower factor of a symmetric matrix; None if it is not positive definite."""
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
