"""What a sparse update keeps of an update, by the rules that mergekit's recipes name.

Each rule is one over a whole tensor, which may come in blocks of rows: first is found what it keeps,
then that is taken of any rows. What is kept may be brought back to the update's ℓ1 length. Every
operation rounds to the update's dtype, so that half-precision arithmetic is that of half-precision
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from covmerge.errors import RecipeError
from covmerge.linalg.bits import pack, unpack
from covmerge.linalg.masks import drop_below
from covmerge.linalg.select import search

Sparsify = Literal["none", "magnitude", "bernoulli", "ranked", "band"]

_NO_LENGTH = 1e-7  # an ℓ1 length below it is not divided by

Numbers = Callable[[tuple[int, ...]], Tensor]  # uniform in [0, 1), float32, for a shape


class Rows(NamedTuple):
    """Some rows of an update.

    Attributes:
        update: as they lie.
        numbers: for these rows; asked in the order of the rows.
    """

    update: Tensor
    numbers: Numbers


Blocks = Callable[[], Iterator[Rows]]  # all rows of an update, each time from the first


@dataclass(frozen=True)
class Kept:
    """What a rule keeps of a tensor.

    Attributes:
        limits: the least and the largest magnitude that is kept, in float32.
        mask: where magnitudes do not tell it, a bit for each entry (`covmerge.linalg.bits`).
        factor: what is kept is multiplied by it, a number of `dtype`; None: it stays.
        dtype: that it is multiplied in; None: the update's.
    """

    limits: tuple[float, float] = (0.0, inf)
    mask: Tensor | None = None
    factor: Tensor | None = None
    dtype: torch.dtype | None = None

    def rows(self, rows: range) -> Kept:
        """What is kept of some rows."""
        mask = self.mask
        return self if mask is None else replace(self, mask=mask[rows.start : rows.stop])

    def of(self, update: Tensor) -> Tensor:
        """Return what is left of the tensor, or of the rows that this belongs to."""
        own = update if self.dtype is None else update.to(self.dtype)
        left = self._left(own)
        return (left if self.factor is None else left * self.factor).to(update.dtype)

    def _left(self, own: Tensor) -> Tensor:
        low, high = self.limits
        if self.mask is not None:
            kept = unpack(self.mask, own.shape).to(own.device)
        elif high == inf and (low <= 0 or own.dtype == torch.float32):
            return drop_below(own, low)
        else:
            sizes = own.abs().float()
            kept = (sizes >= low) & (sizes <= high)
        return kept.to(own.dtype).mul_(own)


EVERYTHING, NOTHING = Kept(), Kept(limits=(inf, inf))


def keep(
    blocks: Blocks,
    shape: Sequence[int],
    how: Sparsify,
    *,
    density: float,
    gamma: float = 0.0,
    epsilon: float = 0.0,
    rescale: bool = False,
) -> Kept:
    """Find what a rule keeps of an update.

    A density of 1 or more keeps all of it, and draws no number; of 0 nothing.

    `magnitude`: the ⌊density · n⌋ largest entries, one at least. `band`: ⌊density · n⌋ entries below the
    ⌊γ n⌋ largest; fewer of these are left out where need be. Of equal magnitudes at an edge those are kept
    that torch's sort of the whole tensor puts first, which is another order on another processor, and is
    asked only where an edge falls among equals. `bernoulli`: each entry by chance, `ranked`: by a chance
    from density − ε to density + ε, by the rank of a magnitude in its row.

    Args:
        blocks: the update, in one piece or in several; `ranked` wants whole rows of two axes or more.
        shape: of all of it.
        how: the rule.
        density: share of the entries that is kept, or its mean.
        gamma: of `band`.
        epsilon: of `ranked`.
        rescale: whether what is left is brought to the update's ℓ1 length.

    Raises:
        RecipeError: density ± ε leaves (0, 1).

    Example:
        >>> update = torch.tensor([3.0, 1.0, -1.0, 2.0])
        >>> whole = lambda: iter([Rows(update, torch.rand)])
        >>> keep(whole, (4,), "magnitude", density=0.5).of(update).tolist()
        [3.0, 0.0, 0.0, 2.0]
        >>> keep(whole, (4,), "band", density=0.25, gamma=0.25).of(update).tolist()
        [0.0, 0.0, -0.0, 2.0]
    """
    count = prod(shape)
    if how == "none" or density >= 1 or not count:
        return EVERYTHING
    if density <= 0 and how in ("magnitude", "ranked"):
        return NOTHING
    most = int(density * count)
    if how == "magnitude":
        kept = _largest(_whole(blocks, count, torch.float32), shape, max(1, most))
    elif how == "band":
        first = max(0, count - most - int(gamma * count))
        kept = _band(_whole(blocks, count, torch.float32), shape, first, most)
    elif how == "bernoulli":
        kept = _by_chance(blocks, lambda own, dtype: torch.full_like(own, density, dtype=dtype))
    else:
        if not (density - epsilon > 0 and density + epsilon < 1):
            raise RecipeError(
                f"sparsify: ranked: density {density:g} ± epsilon {epsilon:g} must stay within (0, 1): "
                "choose a smaller epsilon"
            )
        ranked = partial(keep_probabilities, density=density, epsilon=epsilon)
        kept = _by_chance(blocks, lambda own, dtype: ranked(own, dtype=dtype))
    return _rescaled(kept, blocks, count) if rescale else kept


def keep_probabilities(
    update: Tensor, density: float, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Probabilities from density − ε to density + ε, by the rank of a magnitude in its row.

    A row goes along the second axis; a tensor of one axis is one row, and one entry has the mean.
    """
    rows = update if update.dim() > 1 else update.reshape(1, -1)
    if rows.shape[1] < 2:
        return torch.full_like(rows, density, dtype=dtype)
    # Which of equal magnitudes comes first is torch's matter.
    order = rows.abs().argsort(dim=1)
    ranks = torch.arange(rows.shape[1], device=rows.device).to(dtype) + 1
    ranks = ranks.view(-1, *[1] * (rows.dim() - 2))
    rank = torch.empty_like(rows, dtype=dtype).scatter_(1, order, ranks.expand_as(order))
    low, high = rank.amin(dim=1, keepdim=True), rank.amax(dim=1, keepdim=True)
    return ((rank - low) / (high - low)).clamp_(0, 1) * 2 * epsilon + (density - epsilon)


def _largest(sizes: Tensor, shape: Sequence[int], most: int) -> Kept:
    (least,) = search(sizes, [len(sizes) - most + 1])
    if len(sizes) - least.below == most:
        return Kept(limits=(least.value, inf))
    return Kept(mask=_bits(sizes.argsort(descending=True)[:most], shape))


def _band(sizes: Tensor, shape: Sequence[int], first: int, most: int) -> Kept:
    """Keep so many entries in the order of their magnitudes, after the `first` smallest."""
    if not most:
        return NOTHING
    low, high = search(sizes, [first + 1, first + most])
    if high.up_to - low.below == most:
        return Kept(limits=(low.value, high.value))
    return Kept(mask=_bits(sizes.argsort()[first : first + most], shape))


def _bits(places: Tensor, shape: Sequence[int]) -> Tensor:
    kept = torch.zeros(prod(shape), dtype=torch.bool, device=places.device)
    kept[places] = True
    return pack(kept.view(*shape))


def _by_chance(blocks: Blocks, chances: Callable[[Tensor, torch.dtype], Tensor]) -> Kept:
    masks: list[Tensor] = []
    dtype = torch.float32
    for update, numbers in blocks():
        # torch has no Bernoulli numbers of other dtypes on the CPU.
        dtype = update.dtype if update.dtype == torch.bfloat16 else torch.float32
        probability = chances(update, dtype).float()
        drawn = numbers(tuple(probability.shape)).to(update.device)
        masks.append(pack((drawn < probability).view_as(update)))
    return Kept(mask=masks[0] if len(masks) == 1 else torch.cat(masks), dtype=dtype)


def _rescaled(kept: Kept, blocks: Blocks, count: int) -> Kept:
    """What is kept, times ‖Δ‖₁ / ‖Δ ⊙ M‖₁; both sums are taken over the whole, as of one tensor."""
    sizes = _whole(blocks, count, kept.dtype)
    whole, done, start = sizes.sum(), 0, 0
    for update, _ in blocks():
        part = sizes[done : done + update.numel()].view_as(update)
        own = kept.rows(range(start, start + len(part))) if part.dim() else kept
        part.copy_(own.of(part))
        done, start = done + part.numel(), start + (len(part) if part.dim() else 0)
    rest = sizes.sum()
    if whole < _NO_LENGTH or rest < _NO_LENGTH:
        return kept
    return replace(kept, factor=whole / rest)


def _whole(blocks: Blocks, count: int, dtype: torch.dtype | None) -> Tensor:
    """All magnitudes of an update, in a row."""
    sizes = torch.empty(0)
    done = 0
    for update, _ in blocks():
        if not done:
            sizes = torch.empty(count, dtype=dtype or update.dtype, device=update.device)
        part = sizes[done : done + update.numel()]
        torch.abs(update.to(part.dtype), out=part.view_as(update))
        done += update.numel()
    return sizes
