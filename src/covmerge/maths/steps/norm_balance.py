"""Norm balance: every update is scaled to the experts' mean norm."""

from __future__ import annotations

from covmerge.base.types import LinearGroup
from covmerge.maths.methods.arithmetic import Strength, balanced
from covmerge.maths.methods.registry import EQUIVARIANT, MULTIPLY_ADD, Reference
from covmerge.maths.steps.registry import register_step


@register_step(
    "norm_balance",
    when="before",
    equation="Δ_t ← Δ_t · (1 − s + s · mean_u ‖Δ_u‖ / ‖Δ_t‖),  s = strength",
    reference=Reference(
        title="Compress then Merge: From Multiple LoRAs into One Low-Rank Adapter",
        venue="ICML 2026",
        arxiv="2606.03723",
        equations="the balance of norms before its bases are found, as in the authors' code",
    ),
    laws=EQUIVARIANT,
    cost=MULTIPLY_ADD,
    unit="tensor",
    factored="both",
)
def norm_balance(group: LinearGroup, *, strength: Strength = 1.0) -> LinearGroup:
    """Scale every expert's update to the experts' mean norm, matrix by matrix.

    An expert that was trained longer then no longer outweighs the others in a sum. Compress-then-Merge
    finds its bases from such updates (its β is 1 − strength), and merges the updates themselves.

    Args:
        group: updates of any one shape.

    Departs from the paper: the mean is over the experts that changed the layer, and an expert that did
    not change it stays as it is (published code: 0/0).

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.tensor([[1.0]]), torch.tensor([[3.0]])), (1.0, 1.0))
        >>> [update.item() for update in norm_balance(group).updates]
        [2.0, 2.0]
    """
    return balanced(group, strength)
