"""Fisher merging: an average of the entries, weighted by their importance in the experts' data."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.methods.registry import AXIS_BOUND, EntryCost, PerEntry, Reference, register


@register(
    "fisher",
    equation="W̄ = W₀ + Σ c_t F_t Δ_t / Σ c_t F_t, entry by entry",
    reference=Reference(
        title="Merging Models with Fisher-Weighted Averaging",
        authors=("Michael S. Matena", "Colin A. Raffel"),
        venue="NeurIPS 2022",
        arxiv="2111.09832",
        equations="Fisher merging, closed form",
    ),
    laws=AXIS_BOUND.copies_give(1.0, "the expert"),
    cost=EntryCost(PerEntry(5), PerEntry(copies=2)),
    unit="element",
    data="fisher",
    published_tuning="the experts' coefficients, on labelled validation data",
)
def fisher(
    group: LinearGroup,
    *,
    floor: Annotated[
        float, Field(ge=1e-20, description="least Fisher information; decides where it vanishes")
    ] = 1e-6,
    floor_how: Annotated[
        Literal["max", "add"], Field(description="max(F, floor), or F + floor")
    ] = "max",
    floor_on: Annotated[
        Literal["all", "first"],
        Field(description="first: where no expert's entry matters, the first expert wins"),
    ] = "all",
    normalize: Annotated[
        bool, Field(description="divide F_t by its norm over all tensors of the expert")
    ] = True,
) -> Merged:
    """Average the experts entry by entry, weighted by their diagonal Fisher information.

    W̄ = W₀ + Σ c_t F_t Δ_t / Σ c_t F_t,  c_t = w_t / ‖F_t‖₂  (Fisher merging)

    Where all F_t vanish, the floor leaves an average weighted by c_t.

    | published code            | floor | floor_how | floor_on | normalize |
    |---------------------------|-------|-----------|----------|-----------|
    | the paper's (mmatena)     | 1e-6  | max       | first    | true      |
    | the same, no favoured one | 1e-6  | max       | all      | true      |
    | RegMean's (bloomberg)     | 1e-10 | add       | all      | false     |
    | MergeLM, FusionBench      | 1e-6  | add       | all      | either    |

    Args:
        group: updates of any one shape with measured Fisher information of that shape; a weight is
            a factor of c_t.
        floor: in the units of F, before F is normalised.
        floor_how: `add` adds the floor to ‖F_t‖₂ too, as published.
        floor_on: `first` makes the result depend on the order of the experts.
        normalize: without it, an expert of large gradients outweighs the others everywhere.

    Raises:
        RecipeError: an expert has no Fisher information.
        TensorError: the Fisher information of an expert has another shape than its update.

    Departs from the paper: no expert is favoured by default. An expert whose Fisher information is
    zero in all tensors is not normalised (published: a division by zero).

    Example:
        >>> from covmerge.base.types import Measured
        >>> updates = (torch.ones(1, 2), torch.zeros(1, 2))
        >>> matters = Measured(torch.tensor([[3.0, 0.0]]), rows=8, total=3.0)
        >>> other = Measured(torch.tensor([[1.0, 0.0]]), rows=8, total=1.0)
        >>> group = LinearGroup(updates, (1.0, 1.0), expert_statistics=(matters, other))
        >>> fisher(group, normalize=False).delta.tolist()
        [[0.75, 0.5]]
    """
    numerator = torch.zeros_like(group.expert_statistics[0].value)
    denominator = torch.zeros_like(numerator)
    for t, (update, measured) in enumerate(
        zip(group.updates, group.expert_statistics, strict=True)
    ):
        importance, share, total = measured.value, group.weights[t], measured.total
        if normalize and total > 0.0:
            share /= total + floor if floor_how == "add" else total
        if floor_on == "all" or t == 0:
            added = floor_how == "add"
            importance = importance + floor if added else importance.clamp_min(floor)
        numerator.addcmul_(update, importance, value=share)
        denominator.add_(importance, alpha=share)
    return Merged(numerator.div_(denominator))
