"""DC-Merge: signs are elected in bases of all experts' leading directions; each keeps its own block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.diagnostics import Summary
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.linalg.select import kth_magnitude
from covmerge.maths.linalg.spectral import TruncatedSvd, rank_tolerance, without_order
from covmerge.maths.methods.elect import merge_agreeing
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register
from covmerge.maths.methods.resolution import RankRtol, resolution
from covmerge.maths.methods.summaries import ARBITRARY, DEPENDENT, UNCHANGED
from covmerge.maths.methods.tsv_m import TsvDiagnostics, leading_triplets, together, triplets_cost

# Float32's differences of equal entries of a core, in units of √max(d_out, d_in) · eps of the largest.
_ROUNDED_APART = 4.0


@dataclass(frozen=True)
class DcDiagnostics(TsvDiagnostics):
    """DC-Merge's diagnostics of one matrix; `directions` is the side of a core."""

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED, DEPENDENT, ARBITRARY)

    # the number of directions whose singular value equals another one of their expert, so that they
    # may be rotated; None: there are none
    arbitrary: int | None = None

    @property
    def arbitrary_result(self) -> bool:
        """Whether directions of equal singular values, which have no order, decide the result."""
        return bool(self.arbitrary)


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    side = max(min(d_out, d_in), count)  # the triplets that all keep together
    triplets = triplets_cost(d_out, d_in, count, itemsize, side)
    products = 2.0 * side * side * (2 * (d_out + d_in) + side)
    # A core and its temporaries; the kept blocks of all experts, which have as many entries, and theirs.
    cores = 5 * side * side * itemsize
    return triplets + Cost(products, cores)


@register(
    "dc_merge",
    equation="W̄ = W₀ + α Û diag(M₁₁ … M_TT) V̂ᵀ,  M = elect(ÛᵀΔ̃_1V̂, …, ÛᵀΔ̃_TV̂),  "
    "Û, V̂ = polar([U_1 … U_T]), polar([V_1 … V_T]),  Δ̃_t = U_t diag(w_tσ_t) V_tᵀ of rank r/T",
    reference=Reference(
        title="DC-Merge: Improving Model Merging with Directional Consistency",
        venue="CVPR 2026",
        arxiv="2603.06242",
        equations="as in the authors' code",
    ),
    laws=EQUIVARIANT.copies_give(
        lambda parameters, count: (
            parameters["scale"]
            if count == 1 and parameters["density"] == 1 and parameters["smoothing"] is None
            else None
        ),
        "1/T of the expert truncated to rank ⌊r/T⌋, times α, as far as its entries are kept",
    ),
    cost=_cost,
    factored="both",
    diagnostics=DcDiagnostics,
    published_tuning="α, on labelled validation data; for adapters the better of smoothing 1 and 5 "
    "is reported",
)
def dc_merge(
    group: LinearGroup,
    *,
    density: Annotated[
        float,
        Field(
            gt=0, le=1, description="share of the entries of a core, the largest, that has a vote"
        ),
    ] = 1e-3,
    smoothing: Annotated[
        float | None,
        Field(
            ge=1,
            description="ρ: the largest of an update's singular values over its smallest, at most, once "
            "they are a line of the same sum; 1: their average; null: they stay. Published: 1 or 5 "
            "for adapters, null for full models",
        ),
    ] = None,
    scale: Annotated[float, Field(description="α, factor of the merged update")] = 1.0,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Elect signs in one basis of the experts' leading directions, and keep each expert's own block.

    W̄ = W₀ + α Û diag(M₁₁ … M_TT) V̂ᵀ  (DC-Merge). U_t, σ_t, V_t are the ⌊r/T⌋ leading triplets of Δ_t,
    with r = min(d_out, d_in). Û and V̂ are the polar factors A (AᵀA)^{†½} of all U_t and of all V_t
    side by side. M is computed entry by entry from the cores M_t = Ûᵀ U_t diag(w_tσ_t) V_tᵀ V̂: the
    largest entries of each core vote, the sign of their sum is elected, and the entries with that sign
    are averaged. Only the blocks of M with one expert's directions on both sides are kept.

    With `smoothing` ρ, the σ_t first become a line from min(ρ, σ_1/σ_k) down to 1, scaled to keep their
    sum, so that the weaker directions of an update count for more.

    Directions shared by experts count less than their own ones: the merge of T copies is divided by T.

    Args:
        group: updates `(d_out, d_in)`; a weight multiplies its expert's singular values.
        density: ⌊density · N⌋ of the N entries of a core vote, at least one, and those that equal the last.
        rank_rtol: the relative cut-off of the numerical rank of an update, and of the vectors side by side.

    `arbitrary` in the diagnostics counts directions whose singular value equals another one of their
    expert. Entries are cut and elected, so the result then depends on which of them LAPACK returns.

    Departs from the paper: the paper was not at hand; this follows its authors' code. Their fixed number
    for adapters, 16 triplets each, is the numerical rank here, and at most ⌊r/T⌋. N counts the entries of
    the core (theirs for full models: r², which differs if T does not divide r). Entries below the rounding
    of the largest, 4 √max(d_out, d_in) · eps of float32, do not vote (theirs count in the average). An
    expert that did not change the layer is left out. Every other expert keeps at least one triplet and none
    beyond its numerical rank, equal singular values at the cut are kept together, and polar takes a
    pseudo-inverse, all as in `tsv_m`.

    Example:
        >>> import torch
        >>> a, b = torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 1.0]))
        >>> dc_merge(LinearGroup((a, b), weights=(1.0, 1.0))).delta.abs().tolist()
        [[3.0, 0.0], [0.0, 1.0]]
    """
    like = group.updates[0]
    known = resolution(group, rank_rtol)
    found = leading_triplets(group, known)
    if not any(len(part.leading) for part in found.parts):  # at most rounding of the stored weights
        return Merged(torch.zeros_like(like), DcDiagnostics(found.unchanged))
    joined = together(group, known, found)
    places = list(_side_by_side(found.parts))
    resolved = _ROUNDED_APART * rank_tolerance(group.shape, torch.float32, None)
    blocks: list[Tensor] = []
    limits: list[float] = []
    for part, weight in zip(found.parts, found.weights, strict=True):
        sigma = (weight * smoothed(part.leading, smoothing)).to(like.dtype)
        # One product for each factor, so that opposite updates have exactly opposite cores.
        core = ((joined.left.mT @ part.left) * sigma) @ (part.right @ joined.right.mT)
        limits.append(_least_that_votes(core, density, resolved))
        blocks.append(torch.cat([core[place, place].flatten() for place in places]))
    merged = merge_agreeing(blocks, [1.0] * len(blocks), thresholds=limits)
    left, start = torch.empty_like(joined.left), 0
    for place in places:
        side = place.stop - place.start
        left[:, place] = joined.left[:, place] @ merged[start : start + side**2].view(side, side)
        start += side**2
    turning = sum(without_order(part.leading) for part in found.parts) if len(places) > 1 else 0
    diagnostics = DcDiagnostics(
        found.unchanged, found.k, places[-1].stop, joined.dependent, turning or None
    )
    return Merged(left.mul_(scale) @ joined.right, diagnostics)


def smoothed(sigma: Tensor, steepest: float | None) -> Tensor:
    """Return singular values, descending, replaced by a line of the same sum; None leaves them.

    Example:
        >>> smoothed(torch.tensor([6.0, 2.0, 1.0]), 2.0).tolist()
        [4.0, 3.0, 2.0]
        >>> smoothed(torch.tensor([6.0, 2.0, 1.0]), 1.0).tolist()
        [3.0, 3.0, 3.0]
    """
    if steepest is None:
        return sigma
    ratio = min(steepest, float(sigma[0] / sigma[-1]))
    line = torch.linspace(ratio, 1.0, len(sigma), dtype=sigma.dtype, device=sigma.device)
    return line * (sigma.sum() / line.sum())


def _side_by_side(parts: Sequence[TruncatedSvd]) -> Iterator[slice]:
    """Yield the slice of each expert's directions among those of all."""
    start = 0
    for part in parts:
        yield slice(start, start + len(part.leading))
        start += len(part.leading)


def _least_that_votes(core: Tensor, density: float, resolved: float) -> float:
    """Return the magnitude of the ⌊density · N⌋-th largest entry, less what rounding may change."""
    count = max(1, int(density * core.numel()))
    rounding = resolved * float(core.abs().max())
    return max(kth_magnitude(core, core.numel() - count + 1) - rounding, rounding)
