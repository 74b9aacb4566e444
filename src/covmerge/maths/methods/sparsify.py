"""The entries that a sparse update keeps of an update, by the rules that mergekit's recipes name.

Each rule looks at a whole tensor, which may come in blocks of rows: first the rule finds what it keeps,
then that is applied to any rows. The largest entries are found without holding the tensor. Of equal
entries those that come first are kept, so the result does not depend on how rows are cut or which machine
computes. The kept part may be rescaled to the update's ℓ1 norm. Every operation rounds to the update's
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

_NO_LENGTH = 1e-7  # a smaller ℓ1 norm is not divided by

Numbers = Callable[[tuple[int, ...]], Tensor]  # (shape) -> uniform float32 numbers in [0, 1)


class Rows(NamedTuple):
    """Some rows of an update, and the random numbers for them."""

    update: Tensor
    numbers: Numbers


Blocks = Callable[[], Iterator[Rows]]  # all rows of an update; each call starts from the first


class Limits(NamedTuple):
    """The range of magnitudes that is kept among some entries."""

    stop: float  # the place behind these entries; they start where the entries before them stop
    least: float  # the least kept magnitude, in float32
    most: float  # the largest kept magnitude


@dataclass(frozen=True)
class KeptEntries:
    """The entries of a tensor that a rule keeps."""

    # ranges of kept magnitudes, for all places; they differ if only some equal magnitudes are kept
    limits: tuple[Limits, ...] = (Limits(inf, 0.0, inf),)
    # one bit per entry, if magnitudes do not decide (`covmerge.maths.linalg.masks`); else None
    mask: Tensor | None = None
    # the number that multiplies the kept entries, of `dtype`; None: they are not scaled
    factor: Tensor | None = None
    dtype: torch.dtype | None = None  # the dtype of this multiplication; None: the update's
    width: int = 1  # the number of entries of a row

    def rows(self, rows: range) -> KeptEntries:
        if self.mask is not None:
            return replace(self, mask=self.mask[rows.start : rows.stop])
        start = rows.start * self.width
        limits = (one._replace(stop=one.stop - start) for one in self.limits if one.stop > start)
        return replace(self, limits=tuple(limits))

    def of(self, update: Tensor) -> Tensor:
        """Return the tensor, or the rows that these entries belong to, with all other entries set to 0."""
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
    """Find the entries that a rule keeps of an update.

    A density of 1 or more keeps all of it and draws no numbers; a density of 0 keeps nothing.

    `magnitude` keeps the ⌊density · n⌋ largest entries, at least one. `band` keeps ⌊density · n⌋ entries
    below the ⌊γ n⌋ largest, and leaves out fewer large ones if there are not enough. Of equal magnitudes
    at an edge, `magnitude` keeps those that come first. `band` orders them by place, so it keeps the last
    ones at its lower edge and the first ones at its upper edge. Stable sorts do the same, a descending
    and an ascending one. `bernoulli` keeps each entry with the probability `density`; `ranked` with a
    probability from density − ε to density + ε, by the rank of its magnitude in its row.

    Args:
        blocks: the update, in one piece or several; `ranked` needs whole rows if there are two axes or
            more.
        shape: shape of the whole update.
        how: the rule.
        density: share of the entries that is kept, or its mean.
        gamma: γ of `band`.
        epsilon: ε of `ranked`.
        rescale: whether the kept part is rescaled to the update's ℓ1 norm.

    Raises:
        RecipeError: with `ranked`, density ± ε leaves (0, 1).

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
    """Return probabilities from density − ε to density + ε, by the rank of a magnitude in its row.

    A row runs along the second axis. A tensor with one axis is one row; a single entry gets the mean.
    """
    rows = update if update.dim() > 1 else update.reshape(1, -1)
    if rows.shape[1] < 2:
        return torch.full_like(rows, density, dtype=dtype)
    # torch decides which of equal magnitudes comes first.
    order = rows.abs().argsort(dim=1)
    ranks = torch.arange(rows.shape[1], device=rows.device).to(dtype) + 1
    ranks = ranks.view(-1, *[1] * (rows.dim() - 2))
    rank = torch.empty_like(rows, dtype=dtype).scatter_(1, order, ranks.expand_as(order))
    low, high = rank.amin(dim=1, keepdim=True), rank.amax(dim=1, keepdim=True)
    return ((rank - low) / (high - low)).clamp_(0, 1) * 2 * epsilon + (density - epsilon)


def _vector(blocks: Blocks) -> Vector:
    """Return the update in the dtype of comparisons: float32, or half precision as it is."""

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
    """Return limits for `most` entries in the order of their magnitudes, after the `first` smallest."""
    if not most:
        return NOTHING.limits
    low, high = search(vector, count, [first + 1, first + most])
    start, stop = 0, inf  # where the least magnitude starts to be kept, and where the largest stops
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
    """Return the values within the limits, and 0 elsewhere."""
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
        # On the CPU torch has Bernoulli numbers of these two dtypes only.
        dtype = update.dtype if update.dtype == torch.bfloat16 else torch.float32
        probability = chances(update, dtype).float()
        drawn = numbers(tuple(probability.shape)).to(update.device)
        masks.append(pack((drawn < probability).view_as(update)))
    return KeptEntries(mask=masks[0] if len(masks) == 1 else torch.cat(masks), dtype=dtype)


def _rescaled(entries: KeptEntries, blocks: Blocks, count: int) -> KeptEntries:
    """Return the entries with the factor ‖Δ‖₁ / ‖Δ ⊙ M‖₁; both sums are those of the whole tensor."""
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
    """Return all magnitudes of an update as one vector."""
    sizes = torch.empty(0)
    done = 0
    for update, _ in blocks():
        if not done:
            sizes = torch.empty(count, dtype=dtype or update.dtype, device=update.device)
        part = sizes[done : done + update.numel()]
        torch.abs(update.to(part.dtype), out=part.view_as(update))
        done += update.numel()
    return sizes
