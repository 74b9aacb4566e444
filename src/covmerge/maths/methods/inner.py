"""The methods that KnOTS, Core Space and CtM run on updates in a space of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import Json, LinearGroup, Merged
from covmerge.maths.methods.average import average
from covmerge.maths.methods.cart import cart
from covmerge.maths.methods.elect import Combine
from covmerge.maths.methods.iso import Flattened, iso_c
from covmerge.maths.methods.registry import Parameters
from covmerge.maths.methods.summaries import ARBITRARY, DEPENDENT, SHORT, UNCHANGED
from covmerge.maths.methods.task_arithmetic import task_arithmetic
from covmerge.maths.methods.ties import ties
from covmerge.maths.methods.tsv_m import tsv_m

Inner = Literal["average", "task_arithmetic", "ties", "cart", "tsv_m", "iso_c"]
InnerParameter = Annotated[Inner, Field(description="f, the method that merges in this space")]
InnerScale = Annotated[
    float, Field(description="λ or α of the inner method; the average is multiplied by it")
]
InnerDensity = Annotated[
    float,
    Field(gt=0, le=1, description="ties: share of an expert's entries, the largest, that is kept"),
]
InnerCombine = Annotated[
    Combine, Field(description="ties: what happens to the entries that have the elected sign")
]
InnerRankRatio = Annotated[
    float,
    Field(gt=0, le=1, description="cart: k over the smaller side in this space; k is at least 1"),
]


@dataclass(frozen=True)
class Inside(Diagnostics):
    """Diagnostics of a space, beside those of the method that merged in it."""

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED, DEPENDENT, ARBITRARY, SHORT)
    lengths: ClassVar[tuple[str, ...]] = Flattened.lengths

    unchanged: int = 0  # the number of experts that did not change the matrix
    components: int | None = None  # KnOTS: the number of directions that the experts have together
    # the number of directions that may be rotated into each other, if that matters; None: none
    arbitrary: int | None = None
    core: tuple[int, int] | None = None  # Core Space and CtM: the sides of the cores
    dependent: int | None = None  # TSV-Merge as the inner method: its `dependent`
    # Core Space: the number of directions of a flat spectrum that may be rounding; None: none
    short: int | None = None

    @property
    def arbitrary_result(self) -> bool:
        """Whether directions of equal singular values, or of rounding alone, decide the result."""
        return bool(self.arbitrary or self.short)

    def beside(self, inner: Merged) -> dict[str, Json]:
        """Return these facts after those of the inner method."""
        return {**inner.stats, **self.as_json()}


def cores_of(updates: Sequence[Tensor], left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    """Return UᵀΔ_tV, one product for each, so that opposite updates have exactly opposite cores."""
    return tuple((left.mT @ u.to(torch.float64) @ right).to(u.dtype) for u in updates)


def merge_inside(
    group: LinearGroup,
    inner: Inner,
    scale: float,
    density: float,
    merge: Combine,
    rank_ratio: float,
    rank_rtol: float | None,
) -> Merged:
    """Run the inner method, with its share of these parameters, on updates in this space's coordinates."""
    match inner:
        case "average":
            return Merged(average(group).delta.mul_(scale))
        case "task_arithmetic":
            return task_arithmetic(group, scale=scale)
        case "ties":
            return ties(group, density=density, scale=scale, merge=merge)
        case "cart":
            return cart(group, rank_ratio=rank_ratio, scale=scale)
        case "tsv_m":
            return tsv_m(group, scale=scale, rank_rtol=rank_rtol)
        case "iso_c":
            return iso_c(group, scale=scale, rank_rtol=rank_rtol)


def inner_replicas(parameters: Parameters, count: int) -> float | None:
    """Return f such that copies of one update Δ give f·Δ; None if they need not."""
    scale: float = parameters["scale"]
    of_sum, of_mean = scale * count, scale
    match parameters["inner"]:
        case "average":
            return of_mean
        case "task_arithmetic":
            return of_sum
        case "cart":
            return 1.0
        case "ties" if parameters["density"] == 1:
            return of_sum if parameters["merge"] == "sum" else of_mean
        case _:
            return None
