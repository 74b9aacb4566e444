"""ESM: updates in the principal directions of their contributions to the outputs, made orthogonal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import fsum, sqrt
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import FLOAT64, Cost, eigh_cost, svd_cost
from covmerge.maths.linalg.lapack import eigh, norm
from covmerge.maths.linalg.polar import CERTAIN, Polar, polar
from covmerge.maths.linalg.spectral import RankRule, truncated_svd, with_equals
from covmerge.maths.methods.registry import AXIS_BOUND, Parameters, Reference, Sides, register
from covmerge.maths.methods.resolution import RankRtol, resolution
from covmerge.maths.methods.summaries import DEPENDENT, UNCHANGED

_EXACT = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class EssentialDiagnostics(Diagnostics):
    """ESM's diagnostics of one matrix."""

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED, DEPENDENT)

    unchanged: int = 0  # the number of experts that did not change the matrix
    unheard: int = 0  # the number of the others whose data did not reach the matrix
    # the number of directions that each of the rest may keep; this and the following fields are
    # None if there is no such expert
    k: int | None = None
    directions: int | None = None  # the number of directions kept by all together
    dependent: int | None = None  # the number of common directions, which are left out


@dataclass(frozen=True)
class _Essential:
    """The part UUᵀΔ of an update in the principal directions of its outputs; float64."""

    left: Tensor  # U `(d_out, k)`, orthonormal, by descending energy
    right: Tensor  # UᵀΔ `(k, d_in)`
    energy: Tensor  # E|uᵀΔz|² `(k,)`
    size: float  # ‖Δ‖
    off: Tensor  # error of the columns of U due to rounding of the stored weights `(k,)`
    floor: float  # upper bound of the error of the rows of UᵀΔ due to rounding


def _sides(parameters: Parameters) -> Sides:
    """Return the sides with which the method turns; with `power`, norms of V's columns fix the inputs."""
    return "outputs" if parameters["power"] else "both"


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    side = min(d_out, d_in)
    directions = min(max(d_out, count), count * side)
    each = svd_cost(d_out, d_in, side, itemsize)
    energies = FLOAT64 * 2.0 * side * (d_in * d_in + d_in * side + side * (d_out + d_in))
    # A Gram matrix in float64 and its product, U, UᵀΔ, and the triplets of the update.
    held = (d_in * d_in + 2 * side * (d_out + 2 * d_in)) * 8
    each = each.then(eigh_cost(side) + Cost(energies, held))
    left, right = (
        svd_cost(*shape, directions, 8) for shape in ((d_out, directions), (directions, d_in))
    )
    joined = left.then(right) + Cost(2.0 * FLOAT64 * directions * d_out * d_in, d_out * d_in * 8)
    return each.times(count).then(joined) + Cost(0.0, 4 * directions * (d_out + d_in) * 8)


@register(
    "esm",
    equation="W̄ = W₀ + α σ̄_U σ̄_V polar(U) polar(V),  U = [U_1s_1 … U_Ts_T],  "
    "V = [s_1U_1ᵀΔ̂_1; …; s_TU_TᵀΔ̂_T]c,  U_t: leading eigenvectors of Δ_tG_tΔ_tᵀ,  "
    "Δ̂_t = Δ_t (‖Δ_t‖ / mean ‖Δ‖)²",
    reference=Reference(
        title="Model Merging in the Essential Subspace",
        venue="CVPR 2026",
        arxiv="2602.20208",
        equations="as in the authors' code for vision; `power: 0, scale: 1` as in that for RoBERTa",
    ),
    laws=AXIS_BOUND.copies_give(None, "its leading directions with a spectrum made flat"),
    cost=_cost,
    data="gram",
    factored=_sides,
    diagnostics=EssentialDiagnostics,
    published_tuning="a factor of the merged update, on labelled validation data",
)
def esm(
    group: LinearGroup,
    *,
    power: Annotated[
        float,
        Field(
            ge=0,
            description="of the norms of updates, and of what all of them make of an input, over "
            "their means; 0: neither counts",
        ),
    ] = 2.0,
    energy_power: Annotated[
        float, Field(ge=0, description="of a direction's energy over their mean: s before its mean")
    ] = 0.15,
    scale: Annotated[float, Field(description="α, factor of the merged update")] = 2.0,
    energy_rtol: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="energies at or below this share of the largest are no directions: those of "
            "statistics, which are stored in float32, are rounding",
        ),
    ] = torch.finfo(torch.float32).eps,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Keep each update's principal directions of the outputs, weigh them, and make them orthogonal.

    W̄ = W₀ + α σ̄_U σ̄_V polar(U) polar(V)  (ESM), where U = [U_1s_1 … U_Ts_T], and V has all
    s_tU_tᵀΔ_t (‖Δ_t‖ / mean ‖Δ‖)^p below each other. U_t are the ⌊d_out/T⌋ leading eigenvectors of
    E[(Δ_tz)(Δ_tz)ᵀ] = Δ_tG_tΔ_tᵀ, the principal directions of what Δ_t adds to the outputs, with
    energies λ, and s_t = (λ / mean λ)^0.15 over its mean. Each column v of V is multiplied by
    (‖v‖ / mean ‖v‖)^p. σ̄ is the mean of the singular values, and polar(A) = A (AᵀA)^{†½}.

    All kept directions count alike in the end, except that the weighing decides between those that are not
    orthogonal. The length of the result follows from mean singular values. If the norms of the updates are
    far apart, the result is many times as long as the updates together: V has the cube of the largest norm,
    its mean has not. `power: 0` avoids that. Few inputs suffice, 32 in the published runs: directions in
    which the inputs have no energy are left out.

    Args:
        group: updates `(d_out, d_in)` with measured Gram matrices G_t `(d_in, d_in)`; a weight
            multiplies its expert's rows of V.
        power: p.
        rank_rtol: the relative cut-off of the numerical rank of an update, and of U.

    Raises:
        RecipeError: an expert has no Gram matrix.
        TensorError: a Gram matrix has another shape.

    Departs from the paper: only the paper's abstract was at hand; this follows its authors' code. Their
    last step multiplies each merged layer by (‖layer‖ / mean norm of the layers of its kind)². A method
    here sees one layer, so this step is left out: layers of small updates change more than there, and
    those of large ones less. Their layers without statistics (the output projections of the ViT's
    attention) are merged as in `tsv_m`; here every linear layer has its own statistics. Directions beyond
    an update's numerical rank, or with no more than `energy_rtol` of the largest energy, are left out
    (published: as many directions as the layer has outputs, with energies of rounding, and arbitrary ones
    if there are fewer inputs). An expert that did not change the layer, or whose data did not reach it,
    is left out; T counts the others. Each keeps at least one direction that its data saw (published, for
    vision: the layer silently becomes 0 for T > d_out), and directions that equal the last are kept.
    polar takes a pseudo-inverse, as in `tsv_m`; a singular value beyond the numerical rank counts as zero
    in the mean. If no expert's data reached the layer, W₀ stays.

    Example:
        >>> from covmerge.base.types import Measured
        >>> a, b = torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
        >>> data = Measured(torch.eye(2), rows=8, total=1.4)
        >>> group = LinearGroup((a, b), (1.0, 1.0), expert_statistics=(data, data))
        >>> esm(group, power=0.0, scale=1.0).delta.tolist()  # a spectrum made flat
        [[2.0, 0.0], [0.0, 2.0]]
    """
    grams = [measured.value for measured in group.expert_statistics]
    like, known = group.updates[0], resolution(group, rank_rtol)
    changed = [t for t, update in enumerate(group.updates) if update.any()]
    heard = [t for t in changed if grams[t].any()]
    diagnostics = EssentialDiagnostics(len(group.updates) - len(changed), len(changed) - len(heard))
    k = max(1, group.shape[0] // max(1, len(heard)))
    parts = [_essential(group.updates[t], grams[t], k, known.rule(t), energy_rtol) for t in heard]
    if not sum(len(part.energy) for part in parts):
        return Merged(torch.zeros_like(like), diagnostics)
    mean = fsum(part.size for part in parts) / len(parts)
    factors = [
        group.weights[t] * (p.size / mean) ** power for t, p in zip(heard, parts, strict=True)
    ]
    scales = [_over_mean(_over_mean(part.energy) ** energy_power) for part in parts]
    each = list(zip(parts, scales, factors, strict=True))
    left = torch.cat([part.left * stretch for part, stretch, _ in each], dim=1)
    right = torch.cat([part.right * (stretch * factor)[:, None] for part, stretch, factor in each])
    off_left = torch.cat([part.off * stretch for part, stretch, _ in each])
    off_right = torch.cat([part.floor * factor * stretch for part, stretch, factor in each])
    if power:
        columns = _over_mean(right.square().sum(dim=0).sqrt()) ** power
        right *= columns
        off_right *= columns.square().mean().sqrt()

    # V's rows, which scale with cubes of norms, are sorted from the longest to the shortest: LAPACK then
    # keeps the digits of short columns.
    order = right.square().sum(dim=1).argsort(descending=True)
    left, right = left[:, order], right[order]
    outer = polar(left, rtol=known.rtol, errors=off_left[order])
    inner = polar(right.mT, rtol=sqrt(max(group.shape)) * _EXACT, errors=off_right[order])
    merged = outer.isometry @ inner.isometry.mT
    merged *= scale * _mean_of(outer, left) * _mean_of(inner, right)
    directions = left.shape[1]
    dependent = max(min(len(left), directions) - outer.k, min(right.shape[1], directions) - inner.k)
    diagnostics = replace(diagnostics, k=k, directions=directions, dependent=dependent)
    return Merged(merged.to(like.dtype), diagnostics)


def _essential(
    update: Tensor, gram: Tensor, k: int, rule: RankRule, energy_rtol: float
) -> _Essential:
    """Return the k principal directions of Δz with most energy, and those that equal the last."""
    found = truncated_svd(update, min(update.shape), rule)
    root = found.right.to(torch.float64) * found.leading[:, None]
    values, vectors = eigh(root @ gram.to(torch.float64) @ root.mT)
    energy, turn = values.flip(0), vectors.flip(1)
    largest = float(found.sigma[0]) ** 2 * float(gram.diagonal().double().sum())
    most = float(energy[0]) if len(energy) else 0.0  # none: the update is at most rounding
    end = max(energy_rtol * most, len(energy) * _EXACT * largest)
    rank = int((energy > end).sum())
    count = with_equals(energy[:rank].sqrt(), min(k, rank))
    energy, turn = energy[:count], turn[:, :count]
    return _Essential(
        left=found.left.to(torch.float64) @ turn,
        right=turn.mT @ root,
        energy=energy,
        size=norm(update),
        off=(turn * (CERTAIN * found.edge / found.leading)[:, None]).square().sum(dim=0).sqrt(),
        floor=found.floor,
    )


def _over_mean(values: Tensor) -> Tensor:
    return values / values.mean()


def _mean_of(found: Polar, matrix: Tensor) -> float:
    """Return the mean singular value of a matrix; those beyond its numerical rank count as zero."""
    return found.nuclear / min(matrix.shape)
