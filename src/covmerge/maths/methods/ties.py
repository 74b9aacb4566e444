"""TIES-Merging: trim, elect sign and merge."""

from __future__ import annotations

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.methods.elect import (
    ELECT_COST,
    CombineParameter,
    Density,
    Scale,
    TrimParameter,
    find_threshold,
    merge_agreeing,
    ranked_density,
    thresholds_of,
    trim_unit,
)
from covmerge.maths.methods.registry import (
    AXIS_BOUND,
    GlobalPass,
    Parameters,
    Reference,
    TensorPass,
    register,
)


def _replicas(parameters: Parameters, count: int) -> float | None:
    if parameters["density"] < 1:
        return None
    return parameters["scale"] * (count if parameters["merge"] == "sum" else 1)


@register(
    "ties",
    equation="W̄ = W₀ + λ mean of Δ̂_t over {t : sgn Δ̂_t = sgn Σ w_t Δ̂_t},  "
    "Δ̂_t = the largest entries of Δ_t",
    reference=Reference(
        title="TIES-Merging: Resolving Interference When Merging Models",
        authors=("Prateek Yadav", "Derek Tam", "Leshem Choshen", "Colin Raffel", "Mohit Bansal"),
        venue="NeurIPS 2023",
        arxiv="2306.01708",
        equations="§4, Algorithm 1",
    ),
    laws=AXIS_BOUND.copies_give(
        _replicas, "its trimmed update; λ times the whole update at density 1"
    ),
    cost=ELECT_COST,
    unit=trim_unit,
    tensor_pass=TensorPass(find_threshold, lambda parameters: 0.0, readings=lambda parameters: 2),
    global_pass=GlobalPass(ranked_density, lambda group, parameters: group.updates),
    published_tuning="λ, on labelled validation data; where there is none it is 1",
)
def ties(
    group: LinearGroup,
    *,
    density: Density = 0.2,
    scale: Scale = 1.0,
    trim: TrimParameter = "global",
    merge: CombineParameter = "mean",
) -> Merged:
    """Trim each expert's update, elect a sign per entry, and merge the entries that agree.

    Δ̂_t = Δ_t ⊙ [|Δ_t| ≥ θ_t],  s = sgn Σ w_t Δ̂_t,
    W̄ = W₀ + λ Σ_{t: sgn Δ̂_t = s} w_t Δ̂_t / Σ_{t: sgn Δ̂_t = s} w_t  (TIES, Algorithm 1)

    θ_t is the (N − ⌊density·N⌋)-th smallest of N magnitudes, so that ⌊density·N⌋ + 1 entries are kept, as
    in the published code, and all of them at density 1. By default N counts all tensors that some expert
    has (adapters have those that they adapt): tensors that changed more keep more. With `trim: tensor` each
    tensor has its own θ_t.

    Args:
        group: updates of any one shape; a weight multiplies its expert's vote and its share of the
            mean (of the sum, with `merge: sum`).

    Departs from the paper: where the votes cancel exactly, no sign is elected and the entry keeps the
    base's value, so that opposite experts cancel. The published code elects the majority sign of the whole
    model there.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.tensor([3.0, 1.0, 0.1]), torch.tensor([1.0, -2.0, 0.2])),
        ...                     weights=(1.0, 1.0))
        >>> ties(group, density=0.4).delta.tolist()
        [2.0, -2.0, 0.0]
    """
    del trim  # `group.thresholds` come from the engine's global pass, which followed it
    thresholds = group.thresholds or group.known or thresholds_of(group.updates, density)
    merged = merge_agreeing(group.updates, group.weights, thresholds=thresholds, combine=merge)
    return Merged(merged.mul_(scale))
