"""KnOTS: adapters are merged in the directions that they have together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import FLOAT64, Cost, joint_cost
from covmerge.maths.linalg.joint import joint_directions
from covmerge.maths.methods.elect import ELECT_COST, TrimParameter, ranked_density
from covmerge.maths.methods.inner import (
    InnerCombine,
    InnerDensity,
    InnerParameter,
    InnerRankRatio,
    InnerScale,
    Inside,
    inner_replicas,
    merge_inside,
)
from covmerge.maths.methods.registry import (
    AXIS_BOUND,
    GlobalPass,
    Parameters,
    Reference,
    Sides,
    register,
)
from covmerge.maths.methods.resolution import RankRtol, resolution

Space = Literal["sv", "v"]
Concat = Literal["inputs", "outputs"]


@dataclass(frozen=True)
class Aligned:
    """All updates in their joint directions: Δ_t = basis · components_t."""

    basis: Tensor  # `(d_out, k)`, of the updates' dtype
    # `(k, d_in)` per expert, zero for an expert that did not change the layer
    components: tuple[Tensor, ...]
    unchanged: int  # the number of experts that did not change the layer
    # the number of directions that may be rotated, because their singular values are equal
    arbitrary: int = 0


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # The cost of the default: TIES, with updates side by side along their inputs.
    rank = min(d_out, count * d_in)
    basis = joint_cost(d_out, d_in, count, itemsize)
    within = ELECT_COST(rank, d_in, count, itemsize)
    products = 2.0 * d_out * rank * d_in * (FLOAT64 * count + 1)
    # U in both dtypes and the components stay; one update and its components are in float64 at a time.
    held = d_out * rank * (8 + itemsize) + count * rank * d_in * itemsize
    one_update = (d_out + rank) * d_in * 8
    return basis.then(within.then(Cost(products, one_update)) + Cost(0.0, held))


def _sides(parameters: Parameters) -> Sides:
    """Return the sides with which the method turns: TIES depends on the axes of one side only."""
    if parameters["inner"] != "ties":
        return "both"
    return "outputs" if parameters["concat"] == "inputs" else "inputs"


def _ranked_density(parameters: Parameters) -> float | None:
    return ranked_density(parameters) if parameters["inner"] == "ties" else None


def _components(group: LinearGroup, parameters: Parameters) -> tuple[Tensor, ...]:
    space, concat, rtol = (parameters[name] for name in ("space", "concat", "rank_rtol"))
    return align(group, space=space, concat=concat, rank_rtol=rtol).components


def align(group: LinearGroup, *, space: Space, concat: Concat, rank_rtol: float | None) -> Aligned:
    """Write the updates, transposed for `concat: outputs`, in their joint singular directions."""
    known = resolution(group, rank_rtol)
    given = [update.mT if concat == "outputs" else update for update in group.updates]
    like, updates = given[0], known.separated(given)
    changed = [update for update in updates if update.any()]
    unchanged = len(updates) - len(changed)
    if not changed:
        return Aligned(like[:, :0], tuple(like[:0] for _ in updates), unchanged)
    errors = [e for e, update in zip(known.rounding, updates, strict=True) if update.any()]
    together = joint_directions(changed, rtol=known.rtol, rounding=errors)
    basis, coordinates = together.left, together.left.mT
    if space == "v":
        basis, coordinates = basis * together.sigma, coordinates / together.sigma[:, None]
    # One product for each update, so that opposite updates have exactly opposite components.
    components = tuple(
        (coordinates @ update.to(torch.float64)).to(like.dtype) for update in updates
    )
    return Aligned(basis.to(like.dtype), components, unchanged, together.arbitrary)


@register(
    "knots",
    equation="W̄ = W₀ + U f(ΣV_1ᵀ, …, ΣV_Tᵀ),  [Δ_1 … Δ_T] = U Σ [V_1ᵀ … V_Tᵀ],  f: TIES",
    reference=Reference(
        title="Model merging with SVD to tie the Knots",
        authors=(
            "George Stoica",
            "Pratik Ramesh",
            "Boglarka Ecsedi",
            "Leshem Choshen",
            "Judy Hoffman",
        ),
        venue="ICLR 2025",
        arxiv="2410.19735",
        equations="KnOTS",
    ),
    laws=AXIS_BOUND.copies_give(
        inner_replicas,
        "what the inner method makes of copies: with `ties` its trimmed update, λ "
        "times the whole at density 1",
    ),
    cost=_cost,
    global_pass=GlobalPass(_ranked_density, _components),
    factored=_sides,
    diagnostics=Inside,
    published_tuning="λ, between 0.4 and 0.7, and the density, 0.2 for ViT-B and else 1, on labelled "
    "validation data",
)
def knots(
    group: LinearGroup,
    *,
    inner: InnerParameter = "ties",
    space: Annotated[
        Space,
        Field(description="merge ΣV_tᵀ, as the published code does, or V_tᵀ, as the paper says"),
    ] = "sv",
    concat: Annotated[
        Concat, Field(description="along which side the updates stand next to each other")
    ] = "inputs",
    density: InnerDensity = 0.2,
    scale: InnerScale = 1.0,
    trim: TrimParameter = "global",
    merge: InnerCombine = "mean",
    rank_ratio: InnerRankRatio = 0.12,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Merge the updates by another method, in the singular directions that they have together.

    W̄ = W₀ + U f(ΣV_1ᵀ, …, ΣV_Tᵀ),  [Δ_1 … Δ_T] = U Σ [V_1ᵀ … V_Tᵀ]  (KnOTS)

    An entry of ΣV_tᵀ, which is UᵀΔ_t `(k, d_in)`, belongs to a joint output direction of the experts,
    where an entry of Δ_t belongs to one output. Three versions of KnOTS are published, all available here:

    - the authors' code, the default: TIES on ΣV_tᵀ, keeping the largest entries of all layers;
    - the paper's text: f on V_tᵀ, and UΣ applied to its result (`space: v`);
    - Core Space's and ACTMat's code: the same, layer by layer (`space: v`, `trim: tensor`).

    The versions agree if f is linear, and then also with f on the updates themselves; with TIES they
    differ. With `space: v` the singular values of V_tᵀ are all 1 if the updates are independent of each
    other, as adapters are: none is leading, and TSV-Merge keeps all. If singular values of [Δ_1 … Δ_T] are
    equal, as for orthogonal updates, their directions in U are arbitrary, and so is TIES' result along
    them: `arbitrary` in the diagnostics counts these directions.

    Args:
        group: updates `(d_out, d_in)`; weights as in the inner method.
        concat: with `outputs` the updates are transposed first, so that their entries belong to an input
            direction.
        density: density of TIES, as in `ties`; likewise `merge` and `trim`, whose N counts ΣV_tᵀ (or V_tᵀ).
        rank_rtol: the relative cut-off of the numerical rank of [Δ_1 … Δ_T], and in the inner method.

    Departs from the paper: the default is the authors' code, which merges ΣV_tᵀ where the paper says
    V_tᵀ. The rank is relative to the largest singular value, because TIES counts the directions; if norms
    differ by more than 50-fold, it is that of updates scaled to one size (published: σ > 1e-5, whatever
    the size of the updates, or no cut-off, and then arbitrary rows of V). LoRA's α/r is part of an update
    (the published code leaves it out). An exact tie of votes elects no sign, as in `ties`. Biases do not
    join the matrix as a column.

    Example:
        >>> import torch
        >>> a, b = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
        >>> group = LinearGroup((a, b), weights=(1.0, 1.0))
        >>> knots(group, density=1.0).delta.round(decimals=4).tolist()
        [[2.0, 1.0], [2.0, 1.0]]
    """
    del trim  # `group.thresholds` come from the engine's global pass, which followed it
    aligned = align(group, space=space, concat=concat, rank_rtol=rank_rtol)
    diagnostics = Inside(
        aligned.unchanged,
        components=len(aligned.components[0]),
        arbitrary=(aligned.arbitrary or None) if inner == "ties" else None,
    )
    if not diagnostics.components:
        return Merged(torch.zeros_like(group.updates[0]), diagnostics)
    inside = LinearGroup(
        aligned.components,
        group.weights,
        thresholds=group.thresholds,
        rounding=group.rounding if space == "sv" else (),
    )
    merged = merge_inside(inside, inner, scale, density, merge, rank_ratio, rank_rtol)
    delta = aligned.basis @ merged.delta
    return Merged(delta.mT if concat == "outputs" else delta, diagnostics.beside(merged))
