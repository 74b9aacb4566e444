"""ResMerge: the parts of updates beyond their leading directions are merged by direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import LinearGroup, LowRank, Merged
from covmerge.maths.linalg.auto import FLOAT64, Cost, leading_cost
from covmerge.maths.linalg.lapack import dot, norm
from covmerge.maths.linalg.spectral import TruncatedSvd, leading_svd
from covmerge.maths.methods.closed_form import stack_weighted
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register
from covmerge.maths.methods.resolution import RankRtol, resolution
from covmerge.maths.methods.summaries import UNCHANGED, Counted

# A smaller mean cosine counts as none: by chance residuals of millions of entries reach as much, and
# float32 reaches a part of it by rounding. The same holds for the rest of heads that cancel.
_NONE = 1e-4

_AVERAGED = Counted(
    "averaged",
    "{count} updates have no more directions than the head that ResMerge takes from them, in {tensors} "
    "({names}): they are averaged there",
)


@dataclass(frozen=True)
class ResDiagnostics(Diagnostics):
    """ResMerge's diagnostics of one matrix."""

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED, _AVERAGED)

    unchanged: int = 0  # the number of experts that did not change the matrix
    # the number of the others whose updates have no more directions than the head
    without_residual: int = 0
    # the number of experts that were averaged, because none of them has a residual
    averaged: int | None = None
    # s_R, the mean cosine of two residuals; this and the following fields are None if there are no
    # residuals
    agreement: float | None = None
    # c_R, the mean cosine of the residuals with their mean direction
    coherence: float | None = None
    # s_H, the mean cosine of two heads, with negative cosines counted as zero
    head_agreement: float | None = None


def _cost(d_out: int, d_in: int, count: int, itemsize: int, *, head_rank: int = 1) -> Cost:
    k, matrix = min(head_rank, d_out, d_in), d_out * d_in
    each = leading_cost(d_out, d_in, k, itemsize)
    heads = count * k * (d_out + d_in) * itemsize
    # The residuals, the last one in float64; later the multiplied-out heads, and both sums.
    residuals = (count * itemsize + 3 * 8) * matrix
    each = each.then(Cost(2.0 * matrix * (2 * FLOAT64 * k + k + count + 2), residuals))
    return each.times(count) + Cost(0.0, heads)


@register(
    "resmerge",
    equation="W̄ = W₀ + A + ρ s_H ‖A‖ H̄/‖H̄‖,  A = c_R^β n̄ q,  q = ΣR_t/‖R_t‖ / ‖ΣR_t/‖R_t‖‖,  "
    "n̄ = mean ‖R_t‖,  Δ_t = H_t + R_t,  H_t of rank K",
    reference=Reference(
        title="ResMerge: Residual-based Spectral Merging of Large Language Models",
        venue="arXiv 2026",
        arxiv="2606.02252",
        equations="SRC-A and the head's correction, as in the authors' code",
    ),
    laws=EQUIVARIANT.copies_give(nan, "its residual, and its head at ρ times the residual's norm"),
    cost=_cost,
    factored="both",
    diagnostics=ResDiagnostics,
)
def resmerge(
    group: LinearGroup,
    *,
    head_rank: Annotated[
        int, Field(ge=1, description="K: leading singular directions that are an update's head")
    ] = 1,
    head_ratio: Annotated[
        float,
        Field(ge=0, description="ρ: norm of the heads' part over that of the rest, at most"),
    ] = 0.2,
    beta_min: Annotated[
        float, Field(ge=0, description="β where all residuals have one direction")
    ] = 0.7,
    beta_max: Annotated[
        float, Field(ge=0, description="β where they are as far from it as can be")
    ] = 1.0,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Merge the residuals of the updates by direction, and let their heads correct it a little.

    W̄ = W₀ + A + ρ s_H ‖A‖ H̄/‖H̄‖  (ResMerge), where H_t are the K leading singular triplets of Δ_t,
    R_t = Δ_t − H_t, and A = c^β n̄ q. q is the direction of ΣR_t/‖R_t‖, n̄ the mean of ‖R_t‖, c the
    mean cosine of R_t with q, and β = β_max − (β_max − β_min)(s̄ + c̄)/2 with s the mean cosine of two
    residuals and x̄ = (x + 1)/2. If s ≤ 0, so that c is at most the 1/√T of directions that have nothing
    in common, A is the mean of the R_t. H̄ is the mean of the heads, and s_H the mean of max(0, cosine)
    over two of them.

    The method is made for experts of reinforcement learning. If most of an update is in its leading
    directions, as for an adapter of small rank, most of it is lost: at the defaults the heads together have
    at most a fifth of the norm of the rest. A single expert is not returned as it is.

    Args:
        group: updates `(d_out, d_in)`; a weight multiplies its expert's part of every mean.
        rank_rtol: the relative cut-off of an update's numerical rank.

    Departs from the paper: only the paper's abstract was at hand; this follows its authors' code. There β
    is β_max in layers whose names belong neither to attention nor to a feed-forward block. An expert that
    did not change the layer is left out (published: it counts in every mean). One that has no more than K
    directions within its numerical rank has no residual (published: rounding is a residual like any
    other). If none has a residual, the experts that changed the layer are averaged (published: the layer
    stays the base's, as every layer of one row, and of adapters of rank K, does). Singular values that
    equal the K-th belong to the head. Two residuals agree if their mean cosine is above 1e-4, and heads
    that cancel to 1e-4 of their norms correct nothing. Constants of 1e-8 are left out.

    Example:
        >>> a, b = torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 3.0]))
        >>> group = LinearGroup((a, b), weights=(1.0, 1.0))
        >>> resmerge(group).delta.diagonal().tolist()  # a mean: residuals of nothing in common
        [0.5, 0.5]
        >>> resmerge(LinearGroup((a.double(),), weights=(1.0,))).delta.diagonal().tolist()  # one expert
        [0.2, 1.0]
    """
    known = resolution(group, rank_rtol)
    changed = known.changed(group)
    unchanged = len(group.updates) - len(changed)
    if not changed:
        return Merged(torch.zeros_like(group.updates[0]), ResDiagnostics(unchanged))
    parts = [leading_svd(update, head_rank, rule) for update, _, rule in changed]
    updates, weights = [update for update, _, _ in changed], [weight for _, weight, _ in changed]
    beyond = [t for t, part in enumerate(parts) if part.rank > len(part.leading)]
    without = len(parts) - len(beyond)
    if not beyond:
        mean = stack_weighted(updates, [weight / sum(weights) for weight in weights])
        return Merged(mean, ResDiagnostics(unchanged, without, averaged=without))
    heads = [_unit_head(part) for part in parts]
    merged, agreement, coherence = _on_the_sphere(
        [_residual(updates[t], parts[t]) for t in beyond],
        [weights[t] for t in beyond],
        lambda confidence: beta_max - (beta_max - beta_min) * confidence,
    )
    head, head_agreement = _direction(heads, [norm(part.leading) for part in parts], weights)
    if head is not None:
        merged.add_(head, alpha=head_ratio * head_agreement * norm(merged))
    diagnostics = ResDiagnostics(unchanged, without, None, agreement, coherence, head_agreement)
    return Merged(merged, diagnostics)


def _unit_head(part: TruncatedSvd) -> LowRank:
    """Return H/‖H‖ of the kept triplets."""
    return LowRank(part.left * (part.leading / norm(part.leading)).to(part.left.dtype), part.right)


def _residual(update: Tensor, part: TruncatedSvd) -> Tensor:
    """Return (I − UUᵀ)Δ(I − VᵀV) = Δ − H.

    Both sides are projected, so that the error of U and V counts as its square: if the head is 1e5 times
    as long as the rest, the difference Δ − H would lose all but two digits.
    """
    left, right = part.left.to(torch.float64), part.right.to(torch.float64)
    rest = update.to(torch.float64)
    rest = rest - left @ (left.mT @ rest)
    rest -= (rest @ right.mT) @ right
    return rest.to(update.dtype)


def _on_the_sphere(
    residuals: Sequence[Tensor], weights: Sequence[float], exponent: Callable[[float], float]
) -> tuple[Tensor, float, float]:
    """Return A, s_R and c_R; the residuals are scaled to norm 1 in place.

    With m the mean of the R_t/‖R_t‖, c_R is ‖m‖, and A is c_R^(β − 1) n̄ m.
    """
    sizes = [norm(residual) for residual in residuals]
    for residual, size in zip(residuals, sizes, strict=True):
        residual.div_(size)
    cosines = torch.tensor([[dot(r, s) for s in residuals] for r in residuals], dtype=torch.float64)
    share = _shares(weights)
    agreement = _mean_of_two(cosines, share)
    coherence = min(1.0, max(0.0, float(share @ cosines @ share)) ** 0.5)
    lengths = share * torch.tensor(sizes, dtype=torch.float64)
    if agreement > _NONE:
        beta = exponent((agreement + coherence + 2.0) / 4.0)
        lengths = share * float(lengths.sum()) * coherence ** (beta - 1.0)
    factors = [float(length) for length in lengths]
    return stack_weighted(residuals, factors), agreement, coherence


def _direction(
    heads: Sequence[LowRank], sizes: Sequence[float], weights: Sequence[float]
) -> tuple[Tensor | None, float]:
    """Return H̄/‖H̄‖, and s_H; None instead of H̄/‖H̄‖ if the heads cancel."""
    cosines = torch.tensor([[_cosine(h, g) for g in heads] for h in heads], dtype=torch.float64)
    agreement = _mean_of_two(cosines.clamp(0.0, 1.0), _shares(weights))
    lengths = [weight * size for weight, size in zip(weights, sizes, strict=True)]
    head = stack_weighted([each.dense() for each in heads], lengths)
    size = norm(head)
    return (head.div_(size) if size > _NONE * sum(lengths) else None), agreement


def _cosine(one: LowRank, other: LowRank) -> float:
    """Return the cosine of two heads of norm 1."""
    left = one.left.to(torch.float64).mT @ other.left.to(torch.float64)
    return float((left * (one.right.to(torch.float64) @ other.right.to(torch.float64).mT)).sum())


def _shares(weights: Sequence[float]) -> Tensor:
    """Return the weights scaled to sum 1."""
    given = torch.tensor(weights, dtype=torch.float64)
    return given / given.sum()


def _mean_of_two(cosines: Tensor, share: Tensor) -> float:
    """Return the weighted mean of a symmetric matrix's off-diagonal entries; 1 for a single entry."""
    if len(share) == 1:
        return 1.0
    pairs = torch.outer(share, share).fill_diagonal_(0.0)
    return float((pairs * cosines).sum() / pairs.sum())
