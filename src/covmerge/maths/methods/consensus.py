"""Consensus Task Arithmetic: keep those entries of the sum that several TALL masks keep."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.masks import at_least
from covmerge.maths.methods.closed_form import stack_weighted
from covmerge.maths.methods.registry import (
    AXIS_BOUND,
    EntryCost,
    Parameters,
    PerEntry,
    Reference,
    register,
)


def _replicas(parameters: Parameters, count: int) -> float:
    """Return the factor for T copies: each copy is compared with λ(T − 1) times itself."""
    if parameters["k"] > 0 and parameters["mask_lambda"] * (count - 1) >= 1:
        return 0.0
    return parameters["scale"] * count


@register(
    "consensus",
    equation="W̄ = W₀ + α [Σ m_t ≥ k] ⊙ Σ w_t Δ_t,  m_t = [|Δ_t| > λ |Σ_{s≠t} Δ_s|]",
    reference=Reference(
        title="Localizing Task Information for Improved Model Merging and Compression",
        authors=(
            "Ke Wang",
            "Nikolaos Dimitriadis",
            "Guillermo Ortiz-Jiménez",
            "François Fleuret",
            "Pascal Frossard",
        ),
        venue="ICML 2024",
        arxiv="2405.07813",
        equations="TALL-masks, Consensus Merging",
    ),
    laws=AXIS_BOUND.copies_give(
        _replicas, "αT times its update (weights 1); the base from λ(T − 1) ≥ 1 on"
    ),
    # The plain sum, three temporaries, and the votes.
    cost=EntryCost(PerEntry(8), PerEntry(copies=5)),
    unit="element",
    published_tuning="λ per expert and α, on labelled validation data",
)
def consensus(
    group: LinearGroup,
    *,
    mask_lambda: Annotated[
        float, Field(ge=0, description="λ, larger masks out more entries of an expert")
    ] = 0.4,
    k: Annotated[int, Field(ge=0, description="experts whose mask must keep an entry")] = 2,
    scale: Annotated[float, Field(description="α, factor of the masked sum")] = 0.3,
) -> Merged:
    """Add the scaled sum of task vectors at the entries that several experts' masks keep.

    m_t = [|Δ_t| > λ |Σ_{s≠t} Δ_s|],  W̄ = W₀ + α [Σ m_t ≥ k] ⊙ Σ w_t Δ_t  (TALL-masks;
    Consensus Merging)

    The published λ is chosen per expert from {0.2, …, 0.6}, and α from {0.1, …, 1}, by the accuracy on
    labelled validation data. Without data, one λ in the middle serves all experts, and α is that of
    `task_arithmetic`.

    Args:
        group: updates of any one shape; weights multiply the task vectors in the sum. The masks are made
            of the unweighted updates, because a heavy expert would mask out all others.
        k: 2 removes entries that no mask or only one keeps, 1 those that none keeps, 0 nothing.

    Departs from the paper: k is at most the number of experts, and the diagnostics have it. A larger k
    would leave the base, and a single expert would be lost with the default. The masks are made of
    updates, not of weights, which rounds less.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.1]])), (1.0, 1.0))
        >>> consensus(group, scale=1.0).delta.tolist()
        [[2.0, 0.0]]
    """
    count = len(group.updates)
    total = stack_weighted(group.updates, [1.0] * count)
    votes = torch.zeros_like(total)
    for update in group.updates:
        others = (total - update).abs_().mul_(mask_lambda)
        votes.add_(update.abs().sub_(others).clamp_min_(0.0).sign_())
    needed = min(k, count)
    merged = stack_weighted(group.updates, group.weights).mul_(scale)
    return Merged(merged.mul_(at_least(votes, needed)), {"k": needed})
