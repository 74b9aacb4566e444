"""Sums over the elements of a tensor, which can be added over row blocks and over tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import Json, LowRank
from covmerge.maths.linalg.lapack import dot, lengths, norm

# Elements that are read together: the temporaries of all experts' rows stay in a core's cache, and counts
# of so many are exact in float32.
_BLOCK = 2**13
_SMALLEST = 1e-28  # so that squares of entries 1e-5 of the usual are above float32's 1e-38
_BLOCK_OF_DEVICE = 2**16  # larger on an accelerator, where every call costs time


@dataclass(frozen=True)
class Sums:
    """Sums over the elements of the base and of T experts' updates, in float64."""

    elements: int
    base: Tensor  # ‖W_0‖² `()`
    along_base: Tensor  # ⟨Δ_t, W_0⟩ `(T,)`
    dots: Tensor  # ⟨Δ_a, Δ_b⟩ `(T, T)`
    touched: Tensor  # the number of elements that both a and b changed `(T, T)`
    agreed: Tensor  # Σ sign Δ_a · sign Δ_b `(T, T)`
    lost_as_update: Tensor  # ‖bf16(Δ_t) − Δ_t‖² `(T,)`
    lost_as_weights: Tensor  # ‖bf16(W_0 + Δ_t) − (W_0 + Δ_t)‖² `(T,)`

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
        """‖Δ_t‖_F of each expert."""
        return numbers(self.dots.diagonal().clamp_min(0.0).sqrt())

    @property
    def along(self) -> list[float]:
        """⟨Δ_t, W_0⟩ of each expert."""
        return numbers(self.along_base)

    @property
    def base_norm(self) -> float:
        """‖W_0‖_F."""
        return sqrt(float(self.base))

    @property
    def cosines(self) -> list[list[float]]:
        """Cosine between the updates of each two experts; 0 if one of them is zero."""
        size = self.dots.diagonal().clamp_min(0.0).sqrt()
        return numbers(_over(self.dots, torch.outer(size, size)).clamp(-1.0, 1.0))

    @property
    def cosines_with_base(self) -> list[float]:
        """Cosine between the weights W_t and W_0 of each expert."""
        base, squares = float(self.base), numbers(self.dots.diagonal())
        pairs = zip(self.along, squares, strict=True)
        return [cosine_with_base(base, along, square) for along, square in pairs]

    @property
    def untouched(self) -> list[float]:
        """Share of the elements that each expert left as they are in the base."""
        return [1.0 - count / self.elements for count in numbers(self.touched.diagonal())]

    @property
    def sign_conflict(self) -> list[list[float]]:
        """Share of the elements changed by two experts on which their signs differ; 0.5 by chance."""
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
        """Return the sums as plain numbers."""
        return {
            name: numbers(value) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }


def cosine_with_base(base: float, along: float, square: float) -> float:
    """Return the cosine between W_t and W_0, of ‖W_0‖², ⟨Δ_t, W_0⟩ and ‖Δ_t‖².

    It is near 1 for a fine-tune, and 0 for an unrelated model.

    Example:
        >>> round(cosine_with_base(4.0, 0.0, 4.0), 3), cosine_with_base(4.0, -4.0, 4.0)
        (0.707, 0.0)
    """
    whole = base + 2.0 * along + square
    if base <= 0.0 or whole <= 0.0:
        return 0.0
    return min(1.0, max(-1.0, (base + along) / (sqrt(base) * sqrt(whole))))


def sums_of(base: Tensor, updates: Sequence[Tensor]) -> Sums:
    """Return the sums over all elements; in float64 if squares overflow or underflow float32.

    W_0 may be some of its rows; the Δ_t are of the same shape, and of one floating dtype and device.

    Example:
        >>> found = sums_of(torch.ones(4), [torch.tensor([1.0, 0.0, 0.0, -1.0]), torch.ones(4)])
        >>> found.untouched, found.sign_conflict[0][1], round(found.cosines[0][1], 3)
        ([0.5, 0.0], 0.5, 0.0)
    """
    found = _sums_of(base, updates, updates[0].dtype)
    exact = updates[0].dtype == torch.float64 or _exact_enough(found, base)
    return found if exact else _sums_of(base, updates, torch.float64)


def _exact_enough(found: Sums, base: Tensor) -> bool:
    """Return whether nothing overflowed, and no mean square is so small that it may have underflowed."""
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
    """Return the sums that `Sums.as_json` wrote."""
    tensors = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in values.items()
        if name != "elements"
    }
    return Sums(elements=values["elements"], **tensors)


def _blocks(
    base: Tensor, updates: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the base's elements `(n,)` and the updates' `(T, n)`, block by block."""
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
    """Return part / whole, and 0 where the whole is 0."""
    return torch.where(whole > 0, part / whole.clamp_min(torch.finfo(whole.dtype).tiny), 0.0)


def numbers(values: Any) -> Any:
    """Return a tensor as plain numbers; torch's own annotation of `tolist` is incomplete."""
    return values.tolist()


# The share of an expert that a weighted sum of updates keeps: retention as a quadratic form in the weights.
#
# For W̄ − W_0 = Σ_t w_t Δ_t the kept share of expert s (`covmerge.maths.measures.retention`) is
#
#     1 − Tr[(Σ w_tΔ_t − Δ_s) Ĉ_s (Σ w_tΔ_t − Δ_s)ᵀ] / Tr[Δ_s Ĉ_s Δ_sᵀ]  =  2 (Q_s w)_s − wᵀ Q_s w
#
#     Q_s[t, u] = Tr[Δ_t Ĉ_s Δ_uᵀ] / Tr[Δ_s Ĉ_s Δ_sᵀ],      Ĉ_s = Δ_sᵀΔ_s
#
# One of the Δ_t may be a merged model's update: with w its unit vector, the share is that model's.

Update = Tensor | LowRank


def quadratics(updates: Sequence[Update], experts: int) -> list[Tensor | None]:
    """Return Q_s `(T, T)`, float64, of the first `experts` of the Δ_t; None for an update of zeros.

    The Δ_t are of one dtype and device; adapters are their factors.

    Example:
        >>> one, two = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> [found] = quadratics([one, two], 1)
        >>> found.round(decimals=6).tolist()
        [[1.0, 0.5], [0.5, 0.25]]
    """
    sizes = [sqrt(u.square_norm()) if isinstance(u, LowRank) else norm(u) for u in updates]
    # Scaled to norm 1, because products of four small numbers would underflow float32.
    factors = [1.0 / (size or 1.0) for size in sizes]
    units = [
        update.times(factor) if isinstance(update, LowRank) else update * factor
        for update, factor in zip(updates, factors, strict=True)
    ]
    found: list[Tensor | None] = []
    for unit, size in zip(units[:experts], sizes, strict=False):
        if size == 0.0:
            found.append(None)
            continue
        form = _form(units, unit)
        place = len(found)
        relative = torch.tensor(sizes, dtype=torch.float64) / size
        scaled = form / form[place, place] * torch.outer(relative, relative)
        found.append(scaled)
    return found


def _form(units: Sequence[Update], expert: Update) -> Tensor:
    """Return Tr[Δ_t Ĉ_s Δ_uᵀ] for all t and u, computed on the smaller side of Δ_s."""
    if isinstance(expert, LowRank):  # Ĉ = Aᵀ(BᵀB)A
        plain = [_product(unit, expert.right.mT) for unit in units]
        weighed = [left @ (expert.left.mT @ expert.left) for left in plain]
    elif expert.shape[0] <= expert.shape[1]:
        plain = weighed = [_product(unit, expert.mT) for unit in units]
    else:
        gram = expert.mT @ expert
        plain = [unit.dense() if isinstance(unit, LowRank) else unit for unit in units]
        weighed = [left @ gram for left in plain]
    form = torch.empty(len(units), len(units), dtype=torch.float64)
    for t, left in enumerate(weighed):
        for u, right in enumerate(plain[: t + 1]):
            form[t, u] = form[u, t] = dot(left, right)
    return form


def _product(update: Update, matrix: Tensor) -> Tensor:
    return update.left @ (update.right @ matrix) if isinstance(update, LowRank) else update @ matrix
