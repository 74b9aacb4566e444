"""Trim, elect a sign, merge the entries that agree: TIES' steps, shared by DARE, DELLA and DC-Merge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from covmerge.maths.linalg.masks import drop_below
from covmerge.maths.linalg.select import kth_magnitude, search, threshold_rank
from covmerge.maths.methods.registry import AnyRows, EntryCost, Groups, Parameters, PerEntry, Unit

Density = Annotated[
    float, Field(gt=0, le=1, description="share of an expert's entries, the largest, that is kept")
]
Scale = Annotated[float, Field(description="λ, factor of the merged task vector")]
Trim = Literal["global", "tensor"]
TrimParameter = Annotated[
    Trim, Field(description="keep the largest entries of the whole model, or of each tensor")
]
Combine = Literal["mean", "sum"]
CombineParameter = Annotated[
    Combine, Field(description="what happens to the entries that have the elected sign")
]


# The cost of two passes over the experts; elected signs, weights and three temporaries are held.
ELECT_COST = EntryCost(PerEntry(16), PerEntry(copies=5, bytes=1))


def trim_unit(parameters: Parameters) -> Unit:
    """Return the unit in which entries are trimmed.

    A threshold from a global pass applies entry by entry; a tensor's own threshold needs the whole tensor.
    """
    return "element" if parameters["trim"] == "global" else "tensor"


def ranked_density(parameters: Parameters) -> float | None:
    """Return the density for which a global pass finds thresholds; None if every tensor has its own."""
    density: float = parameters["density"]
    return density if parameters["trim"] == "global" and density < 1 else None


def thresholds_of(vectors: Sequence[Tensor], density: float) -> tuple[float, ...]:
    """Return each expert's least kept magnitude: ⌊density·N⌋ of N entries are above it.

    Example:
        >>> thresholds_of([torch.tensor([3.0, -1.0, 0.5, -4.0])], density=0.5)
        (1.0,)
    """
    rank = threshold_rank(density, vectors[0].numel())
    return tuple(kth_magnitude(vector, rank) for vector in vectors)


def find_threshold(groups: Groups, shape: Sequence[int], parameters: Parameters) -> AnyRows:
    """Return one expert's threshold in a tensor that comes in blocks of rows."""

    def vector() -> Iterator[Tensor]:
        for group in groups():
            yield group.updates[0]

    count = prod(shape)
    (found,) = search(vector, count, [threshold_rank(parameters["density"], count)])
    return AnyRows(found.value)


def merge_agreeing(
    vectors: Sequence[Tensor],
    weights: Sequence[float],
    *,
    thresholds: Sequence[float] | None = None,
    combine: Combine = "mean",
) -> Tensor:
    """Merge the entries that have the sign of the weighted sum.

    s = sgn Σ w_t v_t;  Σ w_t v_t [/ Σ w_t] over the t with sgn v_t = s.  Where the sum is exactly zero,
    no sign is elected and the result is zero: opposite experts cancel.

    Args:
        vectors: v_t of any one shape.
        weights: w_t.
        thresholds: entries of smaller magnitude count as zero; None: all entries count.
        combine: mean or sum.
    """
    limits = [0.0] * len(vectors) if thresholds is None else thresholds
    experts = list(zip(vectors, limits, weights, strict=True))
    elected = torch.zeros_like(vectors[0])
    for vector, limit, weight in experts:
        # Not add_(alpha=weight): its fused multiply-add leaves a residue where opposite experts cancel.
        elected.add_(drop_below(vector, limit) * weight)
    elected.sign_()
    total, share = torch.zeros_like(elected), torch.zeros_like(elected)
    for vector, limit, weight in experts:
        agreeing = (drop_below(vector, limit) * elected).clamp_min_(0.0)
        share.add_(agreeing.sign(), alpha=weight)
        total.add_(agreeing.mul_(weight))
    if combine == "mean":
        total.div_(share.clamp_min_(min(weights)))
    return total.mul_(elected)
