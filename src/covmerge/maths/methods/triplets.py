"""The leading singular triplets of every update, ⌊r/T⌋ each."""

from __future__ import annotations

from dataclasses import dataclass

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.auto import Cost, leading_cost, polar_cost
from covmerge.maths.linalg.polar import Orthogonalized, orthogonalized
from covmerge.maths.linalg.spectral import TruncatedSvd, leading_svd
from covmerge.maths.methods.resolution import Resolution


@dataclass(frozen=True)
class Triplets:
    """Of the experts that changed a layer, in their order.

    Attributes:
        unchanged: how many did not.
        k: triplets that each may keep; None: there are no experts.
        parts: of each expert, those of its k largest singular values, their equals, and none
            beyond its numerical rank.
        weights: w_t.
    """

    unchanged: int
    k: int | None
    parts: tuple[TruncatedSvd, ...]
    weights: tuple[float, ...]


def leading_triplets(group: LinearGroup, known: Resolution, *, lossless: bool = False) -> Triplets:
    """Return the ⌊r/T⌋ leading triplets of every update, at least one; all of them if `lossless`.

    r = min(d_out, d_in), and T counts the experts that changed the layer.

    Example:
        >>> import torch
        >>> from covmerge.maths.methods.resolution import resolution
        >>> group = LinearGroup((torch.eye(4), torch.zeros(4, 4), torch.eye(4)), (1.0, 1.0, 1.0))
        >>> found = leading_triplets(group, resolution(group, None))
        >>> found.unchanged, found.k, len(found.parts)
        (1, 2, 2)
    """
    if lossless:
        return _find(group, known, lossless=True)
    return group.once(f"leading triplets, {known}", lambda: _find(group, known, lossless=False))


def _find(group: LinearGroup, known: Resolution, *, lossless: bool) -> Triplets:
    changed = known.changed(group)
    unchanged = len(group.updates) - len(changed)
    if not changed:
        return Triplets(unchanged, None, (), ())
    side = min(group.shape)
    k = side if lossless else max(1, side // len(changed))
    parts = tuple(
        leading_svd(update, k, rtol=known.rtol, rounding=error) for update, _, error in changed
    )
    return Triplets(unchanged, k, parts, tuple(weight for _, weight, _ in changed))


def together(group: LinearGroup, known: Resolution, found: Triplets) -> Orthogonalized:
    """The polar factors of the vectors of all experts side by side, for `found` of some experts.

    Several methods may be given the same: they must not be modified.
    """

    def make() -> Orthogonalized:
        return orthogonalized(found.parts, rtol=known.rtol)

    return group.once(f"polar factors of {found.k} triplets each, {known}", make)


def kept_together(d_out: int, d_in: int, count: int) -> int:
    """How many triplets `count` experts keep, but for equals.

    Example:
        >>> kept_together(24, 40, 4), kept_together(3, 40, 4)
        (24, 4)
    """
    return max(min(d_out, d_in), count)


def triplets_cost(d_out: int, d_in: int, count: int, itemsize: int, total: int) -> Cost:
    """Cost of `total` triplets, and of U diag(s) V with the polar factors of their vectors side by side."""
    each = leading_cost(d_out, d_in, max(1, total // count), itemsize)
    together = polar_cost(d_out, d_in, total, itemsize)
    held = total * (d_out + d_in) * itemsize
    return Cost(
        count * each.flops + together.flops,
        max(each.workspace + held, together.workspace),
        count * each.eigen + together.eigen,
    )
