"""What a sparse update keeps of an update, by the rules that mergekit's recipes name.

Each rule is one over a whole tensor, which may come in blocks of rows: first is found what it keeps,
then that is taken of any rows. The largest entries are found without holding the tensor, and of equal
ones those that come first are kept, so that it is the same however rows are cut and whoever computes.
What is kept may be brought back to the update's ℓ1 length. Every operation rounds to the update's
dtype, so that half-precision arithmetic is that of half-precision tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from covmerge.base.errors import RecipeError
from covmerge.maths.linalg.masks import drop_above, drop_below, pack, unpack
from covmerge.maths.linalg.select import Vector, place_behind, search

Sparsify = Literal["none", "magnitude", "bernoulli", "ranked", "band"]

_NO_LENGTH = 1e-7  # an ℓ1 length below it is not divided by

Numbers = Callable[[tuple[int, ...]], Tensor]  # uniform in [0, 1), float32, for a shape


class Rows(NamedTuple):
    """Some rows of an update."""

    update: Tensor
    numbers: Numbers


Blocks = Callable[[], Iterator[Rows]]  # all rows of an update, each time from the first


class Limits(NamedTuple):
    """Which magnitudes are kept of some entries.

    Attributes:
        stop: the place behind them, in the order of the rows; they begin where those before them end.
        least: that is kept, in float32.
        most: that is kept.
    """

    stop: float
    least: float
    most: float


@dataclass(frozen=True)
class KeptEntries:
    """What a rule keeps of a tensor.

    Attributes:
        limits: for all places; they differ where some of equal magnitudes are kept.
        mask: where magnitudes do not tell it, a bit for each entry (`covmerge.maths.linalg.masks`).
        factor: what is kept is multiplied by it, a number of `dtype`; None: it stays.
        dtype: that it is multiplied in; None: the update's.
        width: entries of a row.
    """

    limits: tuple[Limits, ...] = (Limits(inf, 0.0, inf),)
    mask: Tensor | None = None
    factor: Tensor | None = None
    dtype: torch.dtype | None = None
    width: int = 1

    def rows(self, rows: range) -> KeptEntries:
        """What is kept of some rows."""
        if self.mask is not None:
            return replace(self, mask=self.mask[rows.start : rows.stop])
        start = rows.start * self.width
        limits = (one._replace(stop=one.stop - start) for one in self.limits if one.stop > start)
        return replace(self, limits=tuple(limits))

    def of(self, update: Tensor) -> Tensor:
        """Return what is left of the tensor, or of the rows that this belongs to."""
        tensor = update if self.dtype is None else update.to(self.dtype)
        left = self._left(tensor)
        return (left if self.factor is None else left * self.factor).to(update.dtype)

    def _left(self, tensor: Tensor) -> Tensor:
        if self.mask is not None:
            mask = unpack(self.mask, tensor.shape).to(tensor.device)
            return mask.to(tensor.dtype).mul_(tensor)
        count = tensor.numel()
        if self.limits[0].stop >= count:
            return _between(tensor, self.limits[0])
        flat, parts, start = tensor.reshape(-1), list[Tensor](), 0
        for limits in self.limits:
            stop = int(min(limits.stop, count))
            parts.append(_between(flat[start:stop], limits))
            start = stop
        return torch.cat(parts).view(tensor.shape)


EVERYTHING, NOTHING = KeptEntries(), KeptEntries(limits=(Limits(inf, inf, inf),))


def keep(
    blocks: Blocks,
    shape: Sequence[int],
    how: Sparsify,
    *,
    density: float,
    gamma: float = 0.0,
    epsilon: float = 0.0,
    rescale: bool = False,
) -> KeptEntries:
    """Find what a rule keeps of an update.

    A density of 1 or more keeps all of it, and draws no number; of 0 nothing.

    `magnitude`: the ⌊density · n⌋ largest entries, one at least. `band`: ⌊density · n⌋ entries below the
    ⌊γ n⌋ largest; fewer of these are left out where need be. Of equal magnitudes at an edge, `magnitude`
    keeps those that come first; `band` has them in their order, and so keeps the last ones at its lower
    edge and the first ones at its upper edge: as stable sorts do, a descending and an ascending one.
    `bernoulli`: each entry by chance, `ranked`: by a chance from density − ε to density + ε, by the rank of
    a magnitude in its row.

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
        [0.0, 0.0, 0.0, 2.0]
    """
    count = prod(shape)
    if how == "none" or density >= 1 or not count:
        return EVERYTHING
    if density <= 0 and how in ("magnitude", "ranked"):
        return NOTHING
    most = int(density * count)
    if how == "magnitude":
        limits = _largest(_vector(blocks), count, max(1, most))
        entries = KeptEntries(limits, width=prod(shape[1:]))
    elif how == "band":
        first = max(0, count - most - int(gamma * count))
        entries = KeptEntries(_band(_vector(blocks), count, first, most), width=prod(shape[1:]))
    elif how == "bernoulli":
        entries = _by_chance(blocks, lambda u, dtype: torch.full_like(u, density, dtype=dtype))
    else:
        if not (density - epsilon > 0 and density + epsilon < 1):
            raise RecipeError(
                f"sparsify: ranked: density {density:g} ± epsilon {epsilon:g} must stay within (0, 1): "
                "choose a smaller epsilon"
            )
        ranked = partial(keep_probabilities, density=density, epsilon=epsilon)
        entries = _by_chance(blocks, lambda u, dtype: ranked(u, dtype=dtype))
    return _rescaled(entries, blocks, count) if rescale else entries


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


def _vector(blocks: Blocks) -> Vector:
    """The update as magnitudes are compared: in float32, or in half precision as it is."""

    def vector() -> Iterator[Tensor]:
        for update, _ in blocks():
            yield update if update.dtype.itemsize < torch.float32.itemsize else update.float()

    return vector


def _largest(vector: Vector, count: int, most: int) -> tuple[Limits, ...]:
    (least,) = search(vector, count, [count - most + 1])
    too_many = count - least.below - most
    if not too_many or not least.value:  # which of the zeros are kept makes no difference
        return (Limits(inf, least.value, inf),)
    place = place_behind(vector, least.value, least.up_to - least.below - too_many)
    return Limits(place, least.value, inf), Limits(inf, least.beside(1), inf)


def _band(vector: Vector, count: int, first: int, most: int) -> tuple[Limits, ...]:
    """Keep so many entries in the order of their magnitudes, after the `first` smallest."""
    if not most:
        return NOTHING.limits
    low, high = search(vector, count, [first + 1, first + most])
    start, stop = 0, inf  # where the least magnitude begins to be kept, and the largest ends
    if low.value:
        start = place_behind(vector, low.value, first - low.below)
    if high.value and high.up_to > first + most:
        stop = place_behind(vector, high.value, first + most - high.below)
    limits: list[Limits] = []
    begin = 0.0
    for end in (*sorted({start, stop} - {0, inf}), inf):
        least = low.value if begin >= start else low.beside(1)
        limits.append(Limits(end, least, high.value if end <= stop else high.beside(-1)))
        begin = end
    return tuple(limits)


def _between(values: Tensor, limits: Limits) -> Tensor:
    """Zeros in place of what is not kept."""
    if values.dtype == torch.float64:
        sizes = values.abs().float()
        within = (sizes >= limits.least) & (sizes <= limits.most)
        return within.to(values.dtype).mul_(values)
    left = drop_below(values, limits.least)
    return left if limits.most == inf else drop_above(left, limits.most)


def _by_chance(blocks: Blocks, chances: Callable[[Tensor, torch.dtype], Tensor]) -> KeptEntries:
    masks: list[Tensor] = []
    dtype = torch.float32
    for update, numbers in blocks():
        # torch has no Bernoulli numbers of other dtypes on the CPU.
        dtype = update.dtype if update.dtype == torch.bfloat16 else torch.float32
        probability = chances(update, dtype).float()
        drawn = numbers(tuple(probability.shape)).to(update.device)
        masks.append(pack((drawn < probability).view_as(update)))
    return KeptEntries(mask=masks[0] if len(masks) == 1 else torch.cat(masks), dtype=dtype)


def _rescaled(entries: KeptEntries, blocks: Blocks, count: int) -> KeptEntries:
    """What is kept, times ‖Δ‖₁ / ‖Δ ⊙ M‖₁; both sums are taken over the whole, as of one tensor."""
    sizes = _whole(blocks, count, entries.dtype)
    whole, done, start = sizes.sum(), 0, 0
    for update, _ in blocks():
        part = sizes[done : done + update.numel()].view_as(update)
        rows = entries.rows(range(start, start + len(part))) if part.dim() else entries
        part.copy_(rows.of(part))
        done, start = done + part.numel(), start + (len(part) if part.dim() else 0)
    rest = sizes.sum()
    if whole < _NO_LENGTH or rest < _NO_LENGTH:
        return entries
    return replace(entries, factor=whole / rest)


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
