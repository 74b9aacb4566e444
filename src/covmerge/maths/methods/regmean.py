"""RegMean: least squares on the layers' measured inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.measured import measured_equations, measured_equations_cost
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.methods.closed_form import solve_ridge, stack_average
from covmerge.maths.methods.registry import AXIS_BOUND, Reference, register
from covmerge.maths.methods.summaries import JITTER

OffDiagonal = Annotated[
    float, Field(ge=0, le=1, description="factor of all entries off the diagonal of every G_t")
]
Ridge = Annotated[
    float,
    Field(
        ge=0,
        description="pulls towards W₀; in units of the mean diagonal entry of ΣG̃_t, so that the "
        "scale of the inputs does not matter",
    ),
]


@dataclass(frozen=True)
class Factorised(Diagnostics):
    """Diagnostics of a Cholesky solve."""

    summaries: ClassVar[tuple[Summary, ...]] = (JITTER,)

    route: str | None = None  # coordinates of the sums, or the reason why there are none
    rcond: float | None = None  # reciprocal condition number of the system
    jitter: float | None = None  # what the factorisation added to the diagonal


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # Inputs that are zero in all data make the float32 factorisation break down. The cost is therefore
    # that of float64, with LAPACK's copy, its right-hand sides and solutions.
    sums = measured_equations_cost(d_out, d_in, count, itemsize)
    solve = d_in**3 / 3 + 2.0 * d_out * d_in * d_in
    return sums + Cost(solve, (2 * d_in * d_in + 3 * d_out * d_in) * 8)


@register(
    "regmean",
    equation="W̄ = W₀ + (Σ Δ_t G̃_t)(Σ G̃_t + ρI)⁻¹,  G̃_t = a·E[z zᵀ] + (1 − a)·diag E[z zᵀ]",
    reference=Reference(
        title="Dataless Knowledge Fusion by Merging Weights of Language Models",
        authors=("Xisen Jin", "Xiang Ren", "Daniel Preotiuc-Pietro", "Pengxiang Cheng"),
        venue="ICLR 2023",
        arxiv="2212.09849",
        equations="§3, Algorithm 1",
    ),
    # The diagonal depends on the axes; only a = 1 does without it.
    laws=AXIS_BOUND.copies_give(
        lambda parameters, count: 1.0 if parameters["ridge"] == 0 else None,
        "the expert, whatever the data of each copy; shrunk by a ridge",
    ),
    cost=_cost,
    data="gram",
    diagnostics=Factorised,
    published_tuning="a, per model family: 0.9, 0.1 or none",
)
def regmean(group: LinearGroup, *, off_diagonal: OffDiagonal = 0.9, ridge: Ridge = 0.0) -> Merged:
    """Merge one linear layer by least squares on every expert's own inputs.

    W̄ = W₀ + (Σ w_t Δ_t G̃_t)(Σ w_t G̃_t + ρI)⁻¹,  G̃_t = a·G_t + (1 − a)·diag G_t  (RegMean, §3)

    G_t = E[z zᵀ] over expert t's inputs of this layer, uncentred. An expert whose update is zero keeps its
    Gram matrix in the sums, unlike in methods without data: its data say that this layer should stay at W₀.
    If no data reached the layer (ΣG_t = 0), updates are averaged.

    Args:
        group: updates `(d_out, d_in)` with measured Gram matrices `(d_in, d_in)`; a weight
            multiplies its expert's Gram matrix.
        off_diagonal: a. The paper names 0.9; its configurations have 0.1, 0.9 or none (1.0 here), depending
            on the model. At 1.0, fewer rows of data than d_in leave the system singular: give a ridge, or
            use `lot`.
        ridge: ρ relative to the mean diagonal entry of Σ w_t G̃_t; the paper has none.

    Raises:
        RecipeError: an expert has no Gram matrix.
        TensorError: a Gram matrix has another shape, or the system stays indefinite.

    Departs from the paper: differences are merged and added to W₀. This is the same if ΣG̃_t has full rank;
    otherwise the published form, with W_t in the numerator, raises an error or loses W₀. One Cholesky
    factorisation replaces the inverse; `jitter` in the diagnostics says what a singular system needed.

    Example:
        >>> import torch
        >>> from covmerge.base.types import Measured
        >>> d, e = torch.tensor([[2.0, 2.0]]), torch.zeros(1, 2)
        >>> data = Measured(torch.diag(torch.tensor([3.0, 1.0])), rows=8, total=3.2)
        >>> other = Measured(torch.diag(torch.tensor([1.0, 3.0])), rows=8, total=3.2)
        >>> merged = regmean(LinearGroup((d, e), (1.0, 1.0), expert_statistics=(data, other)))
        >>> merged.delta.round(decimals=4).tolist()
        [[1.5, 0.5]]
    """
    grams = [measured.value for measured in group.expert_statistics]
    normal = measured_equations(
        group.updates, grams, group.weights, off_diagonal=off_diagonal, ridge=ridge
    )
    if not normal.gram.any():
        return Merged(stack_average(group), Factorised("average: no data"))
    merged, factor = solve_ridge(normal)
    return Merged(merged, Factorised(normal.route, factor.rcond, factor.jitter))
