"""EMR-Merging: one elected task vector, and a mask and a factor for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, TensorDiagnostics
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.methods.registry import AXIS_BOUND, EntryCost, PerEntry, Reference, register


@dataclass(frozen=True)
class Masses(Diagnostics):
    """The sums over a tensor, or some of its rows, that `rescalers` needs. They add up over rows."""

    size: int = 0  # number of entries
    expert_mass: tuple[float, ...] = ()  # Σ|Δ_t| per expert
    kept_mass: tuple[float, ...] = ()  # Σ|m_t ⊙ u| per expert


@register(
    "emr",
    equation="W̄ = W₀ + u,  u = s ⊙ max_t |Δ_t| over {t : sgn Δ_t = s},  s = sgn Σ w_t Δ_t;  "
    "expert t: W₀ + γ_t m_t ⊙ u,  m_t = [Δ_t ⊙ s > 0]",
    reference=Reference(
        title="EMR-Merging: Tuning-Free High-Performance Model Merging",
        authors=("Chenyu Huang", "Peng Ye", "Tao Chen", "Tong He", "Xiangyu Yue", "Wanli Ouyang"),
        venue="NeurIPS 2024",
        arxiv="2405.17461",
        equations="Elect, Mask, Rescale",
    ),
    laws=AXIS_BOUND.copies_give(1.0, "the expert"),
    # The flags, two temporaries, a float64 copy while summing, and all masks.
    cost=EntryCost(PerEntry(12, bytes=1), PerEntry(copies=3, bytes=8)),
    unit="element",
    diagnostics=Masses,
    writes_masks=True,
)
def emr(group: LinearGroup) -> Merged:
    """Elect one task vector for all experts, and mask and rescale it for each of them.

    s = sgn Σ w_t Δ_t,  u = s ⊙ max_t |Δ_t| over the t with sgn Δ_t = s;
    expert t runs with W₀ + γ_t m_t ⊙ u,  m_t = [Δ_t ⊙ s > 0]  (EMR, Elect, Mask and Rescale)

    The result is one model per expert, not one for all: its user must know the task. W₀ + u is the unified
    model. The masks are written beside it, and γ_t, from `rescalers`, once all tensors are merged.

    Args:
        group: updates of any one shape; weights multiply the votes for the sign, not the magnitudes.

    Returns:
        u, the masks, and the sums that `rescalers` needs.

    Departs from the paper: nowhere; votes that cancel exactly elect the negative sign, as in the
    published code.

    Example:
        >>> group = LinearGroup((torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, 2.0]])), (1.0, 1.0))
        >>> merged = emr(group)
        >>> merged.delta.tolist(), [mask.tolist() for mask in merged.masks]
        ([[3.0, 2.0]], [[[True, False]], [[True, True]]])
        >>> rescalers([merged.diagnostics])
        [1.3333333333333333, 0.6]
    """
    votes = torch.zeros_like(group.updates[0])
    for update, weight in zip(group.updates, group.weights, strict=True):
        votes.add_(update * weight)  # no fused multiply-add: opposite experts cancel exactly
    sign = (votes > 0).to(votes.dtype).mul_(2.0).sub_(1.0)
    del votes
    masks: list[Tensor] = []
    unified = torch.zeros_like(sign)
    for update in group.updates:
        agreeing = (update * sign).clamp_min_(0.0)
        masks.append(agreeing > 0)
        torch.maximum(unified, agreeing, out=unified)
    masses = Masses(
        unified.numel(),
        tuple(_sum(update.abs()) for update in group.updates),
        tuple(_sum(unified * mask) for mask in masks),
    )
    return Merged(unified.mul_(sign), masses, tuple(masks))


def rescalers(per_tensor: Sequence[Masses]) -> list[float]:
    """Return the factors γ_t = Σ mean|Δ_t| / Σ mean|m_t ⊙ u| of each expert, summed over all tensors.

    They are ratios of sums of means, as in the published code: a small tensor weighs as much as a large
    one. An expert that equals the base, or no entry of which has the elected sign, has γ_t = 1 (published:
    NaN or Inf); its masks are empty.

    Args:
        per_tensor: diagnostics of `emr`, one per tensor, with those of its row blocks added up.
    """
    tensors = [tensor for tensor in per_tensor if tensor.size]
    factors: list[float] = []
    for expert in range(len(per_tensor[0].expert_mass)):
        whole = sum(tensor.expert_mass[expert] / tensor.size for tensor in tensors)
        masked = sum(tensor.kept_mass[expert] / tensor.size for tensor in tensors)
        factors.append(whole / masked if masked > 0 else 1.0)
    return factors


def rescalers_of(diagnostics: Sequence[TensorDiagnostics]) -> dict[str, float]:
    """Return γ_t by expert from the diagnostics of a merge; tensors of other methods are ignored."""
    masked = [
        (one.experts, masses)
        for one in diagnostics
        if (masses := [m for m in one.matrices if isinstance(m, Masses)])
    ]
    experts = list(dict.fromkeys(expert for names, _ in masked for expert in names))
    per_tensor = [_of_tensor(blocks, names, experts) for names, blocks in masked]
    return dict(zip(experts, rescalers(per_tensor), strict=True)) if masked else {}


def _of_tensor(blocks: Sequence[Masses], names: Sequence[str], experts: Sequence[str]) -> Masses:
    """Return the sum over the row blocks of a tensor; an expert that lacks the tensor adds nothing."""
    places = {expert: place for place, expert in enumerate(names)}

    def total(per_block: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(
            sum(block[places[expert]] for block in per_block) if expert in places else 0.0
            for expert in experts
        )

    return Masses(
        sum(block.size for block in blocks),
        total([block.expert_mass for block in blocks]),
        total([block.kept_mass for block in blocks]),
    )


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))
