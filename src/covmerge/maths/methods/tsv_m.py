"""TSV-Merge: the leading singular triplets of every update, orthogonalised against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import Cost, leading_cost, polar_cost
from covmerge.maths.linalg.polar import Orthogonalized, orthogonalized
from covmerge.maths.linalg.spectral import TruncatedSvd, leading_svd
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register
from covmerge.maths.methods.resolution import RankRtol, Resolution, resolution
from covmerge.maths.methods.summaries import DEPENDENT, UNCHANGED

# The ⌊r/T⌋ leading singular triplets of every update.


@dataclass(frozen=True)
class Triplets:
    """The leading triplets of the experts that changed a layer, in their order."""

    unchanged: int  # the number of experts that did not change the layer
    k: int | None  # the number of triplets that each expert may keep; None: there are no experts
    # for each expert, the triplets of its k largest singular values and those equal to the last, up
    # to its numerical rank
    parts: tuple[TruncatedSvd, ...]
    weights: tuple[float, ...]  # w_t


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

    def find() -> Triplets:
        changed = known.changed(group)
        unchanged = len(group.updates) - len(changed)
        if not changed:
            return Triplets(unchanged, None, (), ())
        side = min(group.shape)
        k = side if lossless else max(1, side // len(changed))
        parts = tuple(leading_svd(update, k, rule) for update, _, rule in changed)
        return Triplets(unchanged, k, parts, tuple(weight for _, weight, _ in changed))

    return find() if lossless else group.once(f"leading triplets, {known}", find)


def together(group: LinearGroup, known: Resolution, found: Triplets) -> Orthogonalized:
    """Return the polar factors of the vectors of all experts in `found`, side by side.

    Several methods may share the result, so it must not be modified.
    """

    def make() -> Orthogonalized:
        return orthogonalized(found.parts, rtol=known.rtol)

    return group.once(f"polar factors of {found.k} triplets each, {known}", make)


def triplets_cost(d_out: int, d_in: int, count: int, itemsize: int, total: int) -> Cost:
    """Return the cost of `total` triplets, and of U diag(s) V with the polar factors of their vectors."""
    each = leading_cost(d_out, d_in, max(1, total // count), itemsize)
    together = polar_cost(d_out, d_in, total, itemsize)
    held = total * (d_out + d_in) * itemsize
    return (each.times(count) + Cost(0.0, held)).then(together)


@dataclass(frozen=True)
class TsvDiagnostics(Diagnostics):
    """TSV-Merge's diagnostics of one matrix."""

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED, DEPENDENT)

    unchanged: int = 0  # the number of experts that did not change the matrix
    # the number of triplets that each of the others may keep; this and the following fields are
    # None if there are no others
    k: int | None = None
    directions: int | None = None  # the number of triplets kept by all together
    dependent: int | None = None  # the number of directions that the experts have nearly in common


def _cost(d_out: int, d_in: int, count: int, itemsize: int, *, lossless: bool = False) -> Cost:
    side = min(d_out, d_in)
    total = count * side if lossless else max(side, count)
    return triplets_cost(d_out, d_in, count, itemsize, total)


@register(
    "tsv_m",
    equation="W̄ = W₀ + α polar([U_1 … U_T]) diag(w_1σ_1 … w_Tσ_T) polar([V_1 … V_T])ᵀ,  "
    "Δ_t ≈ U_t diag(σ_t) V_tᵀ of rank r/T",
    reference=Reference(
        title="Task Singular Vectors: Reducing Task Interference in Model Merging",
        authors=(
            "Antonio Andrea Gargiulo",
            "Donato Crisostomi",
            "Maria Sofia Bucarelli",
            "Simone Scardapane",
            "Fabrizio Silvestri",
            "Emanuele Rodolà",
        ),
        venue="CVPR 2025",
        arxiv="2412.00081",
        equations="TSV-Merge",
    ),
    laws=EQUIVARIANT.copies_give(
        lambda parameters, count: (
            parameters["scale"] if count == 1 or parameters["lossless"] else None
        ),
        "the expert truncated to rank ⌊r/T⌋, times α; all of it with `lossless`",
    ),
    cost=_cost,
    factored="both",
    diagnostics=TsvDiagnostics,
    published_tuning="α, on labelled validation data",
)
def tsv_m(
    group: LinearGroup,
    *,
    scale: Annotated[float, Field(description="α, factor of the merged update")] = 1.0,
    lossless: Annotated[
        bool,
        Field(
            description="keep every update at its full numerical rank; takes up to T times the memory"
        ),
    ] = False,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Keep each update's leading singular triplets, and make the singular vectors orthogonal.

    W̄ = W₀ + α polar(U) diag(σ) polar(V)ᵀ  (TSV-Merge), where U, σ, V hold the ⌊r/T⌋ leading
    triplets of every Δ_t side by side, r = min(d_out, d_in), and polar(A) = A (AᵀA)^{†½}.

    Args:
        group: updates `(d_out, d_in)`; a weight multiplies its expert's singular values.
        rank_rtol: the relative cut-off of the numerical rank of an update, and of the vectors side by side.

    Departs from the paper: an expert that did not change the layer is left out, and T counts the others.
    Every other expert keeps at least one triplet (published: the layer silently becomes 0 for T > r) and
    none beyond its numerical rank (published: arbitrary vectors; float32 and float64 differ by 80–130 %
    on adapters). polar takes a pseudo-inverse: where experts share directions, the published factor adds
    arbitrary ones. Δ and −Δ thus give 0, and T copies of an expert give the expert, truncated. Singular
    values that equal an update's last kept one are kept too, because their order is arbitrary.

    Example:
        >>> import torch
        >>> a, b = torch.diag(torch.tensor([3.0, 2.0])), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
        >>> tsv_m(LinearGroup((a, b), weights=(1.0, 1.0))).delta.round().abs().tolist()
        [[3.0, 0.0], [0.0, 1.0]]
    """
    known = resolution(group, rank_rtol)
    found = leading_triplets(group, known, lossless=lossless)
    if not found.parts:
        return Merged(torch.zeros_like(group.updates[0]), TsvDiagnostics(found.unchanged))
    sigma = torch.cat([p.leading * w for p, w in zip(found.parts, found.weights, strict=True)])
    joined = together(group, known, found)
    merged = (joined.left * (scale * sigma.to(joined.left.dtype))) @ joined.right
    return Merged(merged, TsvDiagnostics(found.unchanged, found.k, len(sigma), joined.dependent))
