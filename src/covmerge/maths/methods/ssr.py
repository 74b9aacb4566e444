"""SSR-Merge: least squares on every expert's inputs, in the space that the adapters' A reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import LinearGroup, LowRank, Merged
from covmerge.maths.covariance.measured import measured_values
from covmerge.maths.linalg.auto import FLOAT64, Cost, eigh_cost, svd_cost
from covmerge.maths.linalg.lapack import eigh, qr
from covmerge.maths.linalg.spectral import truncated_svd
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register
from covmerge.maths.methods.resolution import RankRtol, resolution
from covmerge.maths.methods.summaries import UNCHANGED

# Statistics are stored in float32: eigenvalues of so little of the largest are rounding of them.
_ROUNDED = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Routed(Diagnostics):
    """Diagnostics of one matrix.

    Attributes:
        unchanged: experts that left the sums.
        rank: directions of z along which the system was solved; None: there was nothing to solve.
    """

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED,)

    unchanged: int = 0
    rank: int | None = None


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # Of full models, whose A together fill the inputs.
    short = min(d_out, d_in)
    each = svd_cost(d_out, d_in, short, itemsize)
    factors = count * short * (d_out + d_in) * itemsize
    folds = 2.0 * count * short * d_in * d_in
    sums = 2.0 * count * (2.0 * d_in * d_in + short * (d_in + d_out)) * d_in
    back = 2.0 * (d_in + 2.0 * d_out) * d_in * d_in
    square, rows = d_in * d_in * 8, d_out * d_in * 8
    return Cost(
        count * each.flops + FLOAT64 * (folds + sums + back) + eigh_cost(d_in).flops,
        factors
        + max(
            each.workspace,
            4 * square + 3 * short * d_in * 8,
            4 * square + 3 * rows,
            2 * square + rows + eigh_cost(d_in).workspace,
        ),
        count * each.eigen + eigh_cost(d_in).eigen,
    )


@register(
    "ssr",
    equation="W̄ = W₀ + B R A,  A = [A_1; …; A_T],  B = [B_1 … B_T],  R = Q(G + ρI)⁻¹,  z = A x,  "
    "G = ΣE_t[z zᵀ],  Q_t = E_t[z_t zᵀ]",
    reference=Reference(
        title="SSR-Merge: Subspace Signal Routing for Training-Free LoRA Merging in Diffusion Models",
        venue="ICML 2026",
        arxiv="2606.10617",
        equations="the router R and the merged factors, as in the published code",
    ),
    laws=EQUIVARIANT.copies_give(
        lambda parameters, count: 1.0 if count == 1 or parameters["ridge"] == 0 else nan,
        "the expert, shrunk by the ridge",
    ),
    cost=_cost,
    data="gram",
    factored="both",
    diagnostics=Routed,
)
def ssr(
    group: LinearGroup,
    *,
    ridge: Annotated[
        float,
        Field(
            ge=0,
            description="ρ, in units of the mean diagonal entry of G, so that neither the scale of "
            "the inputs nor a factor that all A share matters",
        ),
    ] = 1e-4,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Merge one linear layer by least squares on what the adapters' A make of the inputs.

    W̄ = W₀ + B R A,  R = Q(G + ρI)⁻¹,  z = A x,  G = Σ w_t E_t[z zᵀ],  Q_t = w_t E_t[z_t zᵀ]  (SSR-Merge)

    A stacks all A_t, B stands all B_t side by side, and Q stacks all Q_t: R passes on of expert t's inputs
    what its own A_t makes of them, with least Σ w_t E_t‖R z − (0, …, z_t, …, 0)‖² but for ρ. Gram
    matrices G_t of the inputs give all of it, G as Σ w_t A G_t Aᵀ and BQ as Σ w_t Δ_t G_t Aᵀ: it is
    RegMean on inputs that are known through A alone. The result is an adapter of rank Σr.

    An adapter says what its A_t is. Of an update that came multiplied out (a full model, a part of a
    fused tensor) it is V_tᵀ of its singular value decomposition within the numerical rank: of updates of
    rank d_in this is `regmean` with `off_diagonal: 1` and the ridge ρ/T. An expert that did not change
    the layer leaves the sums, and its data with it; so does one whose data did not reach it. Where one
    is left, its update is returned as it is.

    The published inputs are what each expert itself generates: its first denoising step from one prompt.
    `covmerge collect` measures inputs that are given, or made for the model (`--inputs generated`). It runs
    whole models: fold an adapter first, whose A_t is then found by the decomposition.
    Inputs that no data has seen are routed too, by what A makes of them.

    Args:
        group: updates `(d_out, d_in)` with measured Gram matrices `(d_in, d_in)`; a weight
            multiplies its expert's Gram matrix.
        ridge: ρ.
        rank_rtol: where the numerical rank of updates that came multiplied out ends.

    Raises:
        RecipeError: an expert has no Gram matrix.
        TensorError: a Gram matrix has another shape.

    Departs from the paper: in the published code ρ is 1e-4 itself, beside a G that is divided by the number
    of all tokens, so that it weighs more where A or the inputs are small. There an expert weighs as many
    tokens as it has; here experts weigh alike. α/r is part of B_t; what the published
    loader makes of it is not established. Sums are in float64 (published: float32, solved in float64),
    and eigenvalues of G + ρI below 1.2e-7 of the largest count as zero: without a ridge the inverse is a
    pseudo-inverse. Where the data of no expert reached the layer W₀ stays (published: R = I, which adds
    all updates up).

    Example:
        >>> from covmerge.base.types import Measured
        >>> a, b = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])
        >>> data = Measured(torch.eye(2), rows=8, total=1.4)
        >>> group = LinearGroup((a, b), (1.0, 1.0), expert_statistics=(data, data))
        >>> ssr(group).delta.round(decimals=3).tolist()  # each input is the other's as often
        [[1.0, 1.5]]
    """
    grams = measured_values(group, "gram", method="ssr")
    like = group.updates[0]
    changed = [t for t, update in enumerate(group.updates) if update.any()]
    diagnostics = Routed(len(group.updates) - len(changed))
    heard = [t for t in changed if grams[t].any()]
    if not heard:
        return Merged(torch.zeros_like(like), diagnostics)
    if len(heard) == 1:
        return Merged(group.updates[heard[0]].clone(), diagnostics)
    factors = _factors(group, heard, rank_rtol)
    root = _root([factor.right for factor in factors])
    system = root.new_zeros(root.shape[1], root.shape[1])
    numerator = root.new_zeros(len(like), root.shape[1])
    for t, factor in zip(heard, factors, strict=True):
        image = grams[t].to(root.dtype) @ root
        system.addmm_(root.mT, image, alpha=group.weights[t])
        routed = factor.right.to(root.dtype) @ image
        numerator.addmm_(factor.left.to(root.dtype), routed, alpha=group.weights[t])
    values, vectors = eigh(system)
    values.clamp_min_(0.0)
    damped = values + ridge * values.sum() / sum(factor.rank for factor in factors)
    large = damped > _ROUNDED * damped[-1]
    along = vectors[:, large]
    delta = ((numerator @ along) / damped[large]) @ (root @ along).mT
    return Merged(delta.to(like.dtype), replace(diagnostics, rank=int(large.sum())))


def _factors(group: LinearGroup, experts: Sequence[int], rank_rtol: float | None) -> list[LowRank]:
    """B_t and A_t; of updates that came multiplied out U_tσ_t and V_tᵀ."""
    if group.factors:
        return [group.factors[t] for t in experts]
    known, side = resolution(group, rank_rtol), min(group.updates[0].shape)
    found = (
        truncated_svd(group.updates[t], side, rtol=known.rtol, rounding=known.rounding[t])
        for t in experts
    )
    return [LowRank(each.left * each.leading.to(each.left.dtype), each.right) for each in found]


def _root(blocks: Sequence[Tensor]) -> Tensor:
    """L `(d_in, k)` with LLᵀ = c²AᵀA of the stacked A and k ≤ d_in, float64.

    Aᵀ(A G Aᵀ + ρI)⁻¹A depends on AᵀA alone: any root of it will do, and the system need not be larger
    than the layer. c brings it near 1.
    """
    root = blocks[0].to(torch.float64)
    for block in blocks[1:]:
        root = torch.cat((root, block.to(torch.float64)))
        if len(root) > root.shape[1]:
            root = qr(root)[1]
    return (root / root.abs().max()).mT
