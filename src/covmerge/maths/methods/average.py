"""Weight averaging: C_t = I in the closed form."""

from __future__ import annotations

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.methods.closed_form import stack_average
from covmerge.maths.methods.registry import EQUIVARIANT, MULTIPLY_ADD, Reference, register


@register(
    "average",
    equation="W̄ = W₀ + Σ w_t Δ_t / Σ w_t",
    reference=Reference(
        title="Model soups: averaging weights of multiple fine-tuned models improves accuracy "
        "without increasing inference time",
        venue="ICML 2022",
        arxiv="2203.05482",
        equations="Table 1",
    ),
    laws=EQUIVARIANT.copies_give(1.0, "the expert"),
    cost=MULTIPLY_ADD,
    factored="both",
    unit="element",
    stands_alone=True,
)
def average(group: LinearGroup) -> Merged:
    """Average the experts' weights.

    W̄ = W₀ + Σ w_t Δ_t / Σ w_t  (Model soups, Table 1; ACE §3.2: the closed form for C_t ∝ I)

    Args:
        group: updates of any one shape; weights are relative.

    Departs from the paper: nowhere.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.ones(1, 2), torch.zeros(1, 2)), weights=(3.0, 1.0))
        >>> average(group).delta.tolist()
        [[0.75, 0.75]]
    """
    return Merged(stack_average(group))
