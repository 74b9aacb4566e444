"""Sums over the elements of a tensor, which add up over its row blocks and over tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import Json
from covmerge.maths.linalg.lapack import lengths

# Elements that are read together: what is made of all experts' rows stays in the cache of a core,
# and counts of so many are exact in float32.
_BLOCK = 2**13
_SMALLEST = 1e-28  # float32 has squares to 1e-38: of what is 1e-5 of the usual
_BLOCK_OF_DEVICE = 2**16  # every call costs an accelerator time


@dataclass(frozen=True)
class Sums:
    """Of the base and the updates of T experts, in float64.

    Attributes:
        elements: how many there are.
        base: ‖W_0‖² `()`.
        along_base: ⟨Δ_t, W_0⟩ `(T,)`.
        dots: ⟨Δ_a, Δ_b⟩ `(T, T)`.
        touched: elements that both a and b changed `(T, T)`.
        agreed: Σ sign Δ_a · sign Δ_b `(T, T)`.
        lost_as_update: ‖bf16(Δ_t) − Δ_t‖² `(T,)`.
        lost_as_weights: ‖bf16(W_0 + Δ_t) − (W_0 + Δ_t)‖² `(T,)`.
    """

    elements: int
    base: Tensor
    along_base: Tensor
    dots: Tensor
    touched: Tensor
    agreed: Tensor
    lost_as_update: Tensor
    lost_as_weights: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.elements + other.elements,
            *(
                getattr(self, name) + getattr(other, name)
                for name in list(self.__dataclass_fields__)[1:]
            ),
        )

    @property
    def norms(self) -> list[float]:
        """‖Δ_t‖_F."""
        return numbers(self.dots.diagonal().clamp_min(0.0).sqrt())

    @property
    def along(self) -> list[float]:
        """⟨Δ_t, W_0⟩."""
        return numbers(self.along_base)

    @property
    def base_norm(self) -> float:
        """‖W_0‖_F."""
        return sqrt(float(self.base))

    @property
    def cosines(self) -> list[list[float]]:
        """Cosine between the updates of each two experts; 0 where one has none."""
        size = self.dots.diagonal().clamp_min(0.0).sqrt()
        return numbers(_over(self.dots, torch.outer(size, size)).clamp(-1.0, 1.0))

    @property
    def cosines_with_base(self) -> list[float]:
        """Cosine between the weights W_t and W_0."""
        base, squares = float(self.base), numbers(self.dots.diagonal())
        pairs = zip(self.along, squares, strict=True)
        return [cosine_with_base(base, along, square) for along, square in pairs]

    @property
    def untouched(self) -> list[float]:
        """Share of the elements that an expert left as they are in the base."""
        return [1.0 - count / self.elements for count in numbers(self.touched.diagonal())]

    @property
    def sign_conflict(self) -> list[list[float]]:
        """Of what two experts both changed, the share that they pull apart; 0.5 is chance."""
        return numbers(_over(self.touched - self.agreed, 2.0 * self.touched))

    @property
    def rounding_of_updates(self) -> list[float]:
        """Share of ‖Δ_t‖ that is lost when the update itself is stored in bfloat16."""
        return numbers(_over(self.lost_as_update, self.dots.diagonal()).sqrt())

    @property
    def rounding_of_weights(self) -> list[float]:
        """Share of ‖Δ_t‖ that is lost when W_0 + Δ_t is stored in bfloat16."""
        return numbers(_over(self.lost_as_weights, self.dots.diagonal()).sqrt())

    def as_json(self) -> dict[str, Json]:
        """The sums themselves."""
        return {
            name: numbers(value) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }


def cosine_with_base(base: float, along: float, square: float) -> float:
    """Return the cosine between W_t and W_0: near 1 for a fine-tune, 0 for a stranger.

    Args:
        base: ‖W_0‖².
        along: ⟨Δ_t, W_0⟩.
        square: ‖Δ_t‖².

    Example:
        >>> round(cosine_with_base(4.0, 0.0, 4.0), 3), cosine_with_base(4.0, -4.0, 4.0)
        (0.707, 0.0)
    """
    whole = base + 2.0 * along + square
    if base <= 0.0 or whole <= 0.0:
        return 0.0
    return min(1.0, max(-1.0, (base + along) / (sqrt(base) * sqrt(whole))))


def sums_of(base: Tensor, updates: Sequence[Tensor]) -> Sums:
    """Look at every element once, or in float64 once more where squares overflow float32, or vanish in it.

    Args:
        base: W_0, or some of its rows.
        updates: Δ_t of the same shape, of one floating dtype and device.

    Example:
        >>> found = sums_of(torch.ones(4), [torch.tensor([1.0, 0.0, 0.0, -1.0]), torch.ones(4)])
        >>> found.untouched, found.sign_conflict[0][1], round(found.cosines[0][1], 3)
        ([0.5, 0.0], 0.5, 0.0)
    """
    found = _sums_of(base, updates, updates[0].dtype)
    exact = updates[0].dtype == torch.float64 or _exact_enough(found, base)
    return found if exact else _sums_of(base, updates, torch.float64)


def _exact_enough(found: Sums, base: Tensor) -> bool:
    """Whether nothing overflowed, and no mean square is so small that float32 may have lost some."""
    squares = torch.cat([found.base.reshape(1), found.dots.diagonal()])
    if not torch.cat([squares, found.lost_as_update, found.lost_as_weights]).isfinite().all():
        return False
    elements = found.elements if found.base > 0.0 or base.any() else 0  # a bias may be all zeros
    changed = torch.cat([found.base.new_tensor([elements]), found.touched.diagonal()])
    return bool((squares >= _SMALLEST * changed).all())


def _sums_of(base: Tensor, updates: Sequence[Tensor], dtype: torch.dtype) -> Sums:
    count = len(updates)
    pairs = [torch.zeros(count, count, dtype=torch.float64) for _ in range(3)]
    single = [torch.zeros(count, dtype=torch.float64) for _ in range(3)]
    along_base, *losses = single
    total = torch.zeros((), dtype=torch.float64)
    for block, rows in _blocks(base, updates, dtype):
        signs = rows.sign()
        changed = signs.abs()
        for found, left in zip(pairs, (rows, changed, signs), strict=True):
            found += (left @ left.mT).cpu()
        total += torch.dot(block, block).cpu()
        along_base += (rows @ block).cpu()
        for lost, values in zip(losses, (rows, rows + block), strict=True):
            error = values.to(torch.bfloat16).to(values.dtype).sub_(values)
            lost += lengths(error, axis=1).cpu().double().square()
    dots, touched, agreed = pairs
    return Sums(base.numel(), total, along_base, dots, touched, agreed, *losses)


def sums_from_json(values: Mapping[str, Any]) -> Sums:
    """Undo `Sums.as_json`."""
    tensors = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in values.items()
        if name != "elements"
    }
    return Sums(elements=values["elements"], **tensors)


def _blocks(
    base: Tensor, updates: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """The base's elements `(n,)` and the updates' `(T, n)`, some at a time."""
    flat = [update.reshape(-1) for update in updates]
    weights = base.reshape(-1)
    size = _BLOCK if flat[0].device.type == "cpu" else _BLOCK_OF_DEVICE
    for start in range(0, weights.numel(), size):
        part = slice(start, start + size)
        yield (
            weights[part].to(flat[0]).to(dtype),
            torch.stack([update[part] for update in flat]).to(dtype),
        )


def _over(part: Tensor, whole: Tensor) -> Tensor:
    """Divide, with 0 where the whole is 0."""
    return torch.where(whole > 0, part / whole.clamp_min(torch.finfo(whole.dtype).tiny), 0.0)


def numbers(values: Any) -> Any:
    """A tensor as plain numbers; torch's own annotation of it is partial."""
    return values.tolist()
