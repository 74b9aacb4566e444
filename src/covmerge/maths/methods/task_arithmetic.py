"""Task Arithmetic: the scaled sum of task vectors."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.methods.closed_form import stack_weighted
from covmerge.maths.methods.registry import EQUIVARIANT, MULTIPLY_ADD, Reference, register


@register(
    "task_arithmetic",
    equation="W̄ = W₀ + λ Σ w_t Δ_t",
    reference=Reference(
        title="Editing Models with Task Arithmetic",
        authors=(
            "Gabriel Ilharco",
            "Marco Tulio Ribeiro",
            "Mitchell Wortsman",
            "Suchin Gururangan",
            "Ludwig Schmidt",
            "Hannaneh Hajishirzi",
            "Ali Farhadi",
        ),
        venue="ICLR 2023",
        arxiv="2212.04089",
        equations="§2",
    ),
    laws=EQUIVARIANT.copies_give(
        lambda parameters, count: parameters["scale"] * count, "λT times its update (weights 1)"
    ),
    cost=MULTIPLY_ADD,
    factored="both",
    unit="element",
    published_tuning="λ, on labelled validation data",
)
def task_arithmetic(
    group: LinearGroup,
    *,
    scale: Annotated[float, Field(description="λ, factor of the sum of task vectors")] = 0.3,
) -> Merged:
    """Add the scaled sum of task vectors to the base.

    W̄ = W₀ + λ Σ w_t Δ_t  (Task Arithmetic, §2)

    The paper tunes λ on labelled validation data and has no single default. 0.3 is the value that its
    users publish without tuning (AdaMerging, FusionBench); ACTMat's tables use 0.4.

    Args:
        group: updates of any one shape; weights multiply the task vectors.

    Departs from the paper: nowhere.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.ones(1, 2), torch.ones(1, 2)), weights=(1.0, 1.0))
        >>> task_arithmetic(group, scale=0.25).delta.tolist()
        [[0.5, 0.5]]
    """
    return Merged(stack_weighted(group.updates, [scale * w for w in group.weights]))
