"""Isotropic merging: the sum of the updates with a flat spectrum, with or without task directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, Summary, TensorDiagnostics
from covmerge.base.text import some
from covmerge.base.types import LinearGroup, Merged, Rounding
from covmerge.maths.linalg.auto import Cost, leading_cost, polar_cost, svd_cost
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.polar import Polar, goes_by_products, orthogonalized, polar_by_products
from covmerge.maths.linalg.spectral import RankRule, TruncatedSvd, leading_svd, truncated_svd
from covmerge.maths.methods.closed_form import stack_weighted
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register
from covmerge.maths.methods.resolution import RankRtol, Resolution, resolution
from covmerge.maths.methods.summaries import DEPENDENT, UNCHANGED, facts

_PAPER = Reference(
    title="No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces",
    authors=(
        "Daniel Marczak",
        "Simone Magistri",
        "Sebastian Cygert",
        "Bartłomiej Twardowski",
        "Andrew D. Bagdanov",
        "Joost van de Weijer",
    ),
    venue="ICML 2025",
    arxiv="2502.04959",
    equations="§4",
)
_LAWS = EQUIVARIANT.copies_give(None, "the expert's singular directions with a flat spectrum")
_TUNING = "α, on labelled validation data"

Scale = Annotated[float, Field(description="α, factor of the merged update")]


@dataclass(frozen=True)
class Flattened(Diagnostics):
    """Diagnostics of a matrix whose spectrum was made flat."""

    lengths: ClassVar[tuple[str, ...]] = ("sigma",)

    rank: int = 0  # the numerical rank of the sum
    sigma: float | None = None  # the mean of the sum's singular values


class UnsureTasks(Summary):
    """Summary of tensors whose task directions rounding of stored weights may turn, by `turned_by`."""

    def notes(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[str]:
        found = {one.tensor: max(facts([one], "turned_by"), default=0.0) for one in diagnostics}
        unsure = {name: off for name, off in found.items() if off > _UNSURE}
        if unsure:
            yield (
                f"rounding of the stored weights may turn task directions of {len(unsure)} tensors by "
                f"about {min(1.0, max(unsure.values())):.1%} ({some(list(unsure), 2)}), and the merge by "
                "several times that: what the common directions leave of an update is small there. Merge "
                "the adapters themselves if you have them, or by iso_c, which has no task directions"
            )


_UNSURE = 1e-3
UNSURE_TASKS = UnsureTasks()


@dataclass(frozen=True)
class FlattenedTasks(Diagnostics):
    """Iso-CTS's diagnostics of one matrix; for a sum that is zero, its rank only."""

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED, DEPENDENT, UNSURE_TASKS)
    lengths: ClassVar[tuple[str, ...]] = ("sigma",)

    unchanged: int | None = None  # the number of experts that did not change the matrix
    rank: int = 0  # the numerical rank of the sum
    common: int | None = None  # the number of directions common to all tasks
    per_task: int | None = None  # the number of directions of each task
    directions: int | None = None  # the number of directions of both kinds
    dependent: int | None = None  # the number of directions that experts have nearly in common
    # the angle by which rounding of stored weights may turn the weakest direction of a task
    turned_by: float | None = None
    sigma: float | None = None  # the mean of the singular values


def _cost_of_sum(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    side = min(d_out, d_in)
    products = Cost(2.0 * d_out * d_in * (count + side), d_out * d_in * itemsize)
    return svd_cost(d_out, d_in, side, itemsize) + products


def _cost_with_tasks(
    d_out: int, d_in: int, count: int, itemsize: int, *, common_fraction: float = 0.8
) -> Cost:
    side = min(d_out, d_in)
    directions = max(side, count)
    common = _cost_of_sum(d_out, d_in, count, itemsize)
    c, s = _dimensions(side, count, common_fraction)
    each = leading_cost(d_out, d_in, s, itemsize)
    project = 4.0 * d_out * d_in * c
    if d_out <= d_in:  # in the few directions that are not common, unless the sum has a lower rank
        rest = leading_cost(d_out - c, d_in, s, itemsize)
        each = replace(each, flops=rest.flops, eigen=rest.eigen)
        project = 2.0 * d_out * (d_out - c) * d_in
    together = polar_cost(d_out, d_in, directions, itemsize, apart=c)
    # The vectors of the sum are held throughout, those of a task until the next.
    whole = side * (d_out + d_in) * itemsize
    task = Cost(project, (directions * (d_out + d_in) + (d_out + side) * d_in) * itemsize)
    return common.then((each + task).times(count).then(together) + Cost(0.0, whole))


@register(
    "iso_c",
    equation="W̄ = W₀ + α σ̄ U Vᵀ,  Σ w_t Δ_t = U diag(σ) Vᵀ,  σ̄ = mean σ",
    reference=_PAPER,
    laws=_LAWS,
    cost=_cost_of_sum,
    factored="both",
    diagnostics=Flattened,
    published_tuning=_TUNING,
)
def iso_c(group: LinearGroup, *, scale: Scale = 1.0, rank_rtol: RankRtol = None) -> Merged:
    """Give the sum of the updates a flat spectrum at its mean singular value.

    W̄ = W₀ + α σ̄ U Vᵀ,  Σ w_t Δ_t = U diag(σ) Vᵀ  (Iso-C)

    Args:
        group: updates `(d_out, d_in)`; weights multiply them.
        rank_rtol: the relative cut-off of the sum's numerical rank.

    Departs from the paper: the mean and the directions are those within the numerical rank of the sum.
    The published code raises null directions, which are arbitrary, to a mean that counts their zeros.

    Example:
        >>> import torch
        >>> d = torch.diag(torch.tensor([3.0, 1.0, 0.0]))
        >>> iso_c(LinearGroup((d,), weights=(1.0,))).delta.diagonal().tolist()
        [2.0, 2.0, 0.0]
    """
    known = resolution(group, rank_rtol)
    quick = _polar_of_sum(group, known)
    if quick is not None:
        mean = quick.nuclear / quick.k
        return Merged(quick.isometry.mul_(mean).mul_(scale), Flattened(quick.k, mean))
    whole = _svd_of_sum(group, known)
    return Merged(flattened(whole).mul_(scale), Flattened(whole.rank, _mean(whole)))


def _polar_of_sum(group: LinearGroup, known: Resolution) -> Polar | None:
    """Return U Vᵀ of Σ w_tΔ_t by products; None if these cost more, or cannot decide the rank."""
    if not goes_by_products(group.updates[0]):
        return None
    total = stack_weighted(group.updates, group.weights)
    return polar_by_products(total, known.of_sum(group))


def flattened(whole: TruncatedSvd) -> Tensor:
    """Return σ̄ U Vᵀ of U diag(σ) Vᵀ within its numerical rank; 0 for a rank of 0."""
    return (whole.left @ whole.right).mul_(_mean(whole))


def _mean(whole: TruncatedSvd) -> float:
    return float(whole.leading.mean()) if whole.rank else 0.0


@register(
    "iso_cts",
    equation="W̄ = W₀ + α σ̄ polar([U_1 … U_T U_c]) polar([V_1 … V_T V_c])ᵀ,  "
    "U_c, V_c of Σ w_t Δ_t,  U_t, V_t of (I − U_cU_cᵀ)Δ_t",
    reference=_PAPER,
    laws=_LAWS,
    cost=_cost_with_tasks,
    factored="both",
    diagnostics=FlattenedTasks,
    published_tuning=_TUNING,
)
def iso_cts(
    group: LinearGroup,
    *,
    common_fraction: Annotated[
        float,
        Field(ge=0, le=1, description="share of the directions that all tasks have in common"),
    ] = 0.8,
    scale: Scale = 1.0,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Join common directions of the sum with directions of every task, and flatten the spectrum.

    W̄ = W₀ + α σ̄ polar([U_1 … U_T U_c]) polar([V_1 … V_T V_c])ᵀ  (Iso-CTS), with the c leading
    singular directions of Σ w_tΔ_t, the s leading ones of every (I − U_cU_cᵀ)Δ_t, and σ̄ the mean of
    all their singular values. With r directions, s = round((r − ⌊common_fraction · r⌋)/T), half to
    even, and c = r − sT.

    Args:
        group: updates `(d_out, d_in)`; weights multiply them.
        rank_rtol: the relative cut-off of the numerical rank of the sum and of the vectors side by side;
            for a projected update, relative to the norm of the whole update.

    Departs from the paper: r is the numerical rank of the sum, not min(d_out, d_in). An expert that did
    not change the layer is left out, and T counts the others. s is at least 1 and c at least 0 (published:
    no task directions for T ≥ 2(r − ⌊common_fraction · r⌋)). Directions beyond the numerical rank of a
    projected update are not used; an update within the common directions adds none. polar takes a
    pseudo-inverse, and equal singular values at a cut are kept, both as in `tsv_m`.

    Example:
        >>> import torch
        >>> a, b = torch.eye(4)[:2], torch.eye(4)[2:]
        >>> iso_cts(LinearGroup((a, b), weights=(1.0, 1.0)), common_fraction=0.5).delta.shape
        torch.Size([2, 4])
    """
    known = resolution(group, rank_rtol)
    whole = _svd_of_sum(group, known)
    if not whole.rank:
        return Merged(torch.zeros_like(group.updates[0]), FlattenedTasks())
    changed = known.changed(group)
    c, s = _dimensions(whole.rank, len(changed), common_fraction)
    common = whole.first(c)
    beyond = _beyond(whole, common)
    tasks = [_task_directions(update, common.left, beyond, s, rule) for update, _, rule in changed]
    sigma = [part.leading * w for part, (_, w, _) in zip(tasks, changed, strict=True)]
    flat = float(torch.cat([*sigma, common.leading]).mean())
    joined = orthogonalized(tasks, rtol=known.rtol, apart=common, frame=beyond)
    diagnostics = FlattenedTasks(
        unchanged=len(group.updates) - len(changed),
        rank=whole.rank,
        common=len(common.right),
        per_task=s,
        directions=len(common.right) + sum(map(len, sigma)),
        dependent=joined.dependent,
        turned_by=_turned_by(whole, common, tasks, changed, known.of_sum(group).rounding),
        sigma=flat,
    )
    return Merged((joined.left @ joined.right).mul_(scale * flat), diagnostics)


def _turned_by(
    whole: TruncatedSvd,
    common: TruncatedSvd,
    tasks: Sequence[TruncatedSvd],
    changed: Sequence[tuple[Tensor, float, RankRule]],
    rounding: Rounding,
) -> float | None:
    """Return how far errors E of the sum and E_t of Δ_t turn a task's weakest direction, to first order.

    E turns u_i out of U_c by ‖E‖/(σ_i − σ_{c+1}). The part of Δ_t that this lets in has the length
    ‖E‖ ‖diag(σ_i − σ_{c+1})⁻¹ U_cᵀΔ_t‖, to which E_t is added. Divided by the task's smallest singular
    value this is the angle.
    """
    if not rounding.edge:
        return None
    c = len(common.right)
    gaps = common.leading - (whole.leading[c] if c < whole.rank else 0.0)
    off = [
        (
            rounding.edge * norm((common.left.mT @ update).double() / gaps[:, None])
            + rule.rounding.edge
        )
        / float(part.leading[-1])
        for part, (update, _, rule) in zip(tasks, changed, strict=True)
        if len(part.right)
    ]
    return max(off, default=None)


def _svd_of_sum(group: LinearGroup, known: Resolution) -> TruncatedSvd:
    """Return all singular triplets of Σ w_tΔ_t within its numerical rank."""

    def make() -> TruncatedSvd:
        total = stack_weighted(group.updates, group.weights)
        return truncated_svd(total, min(total.shape), known.of_sum(group))

    return group.once(f"svd of the sum, {known}", make)


def _dimensions(rank: int, count: int, common_fraction: float) -> tuple[int, int]:
    """Return the number of common directions, and the number that each task adds."""
    per_task = max(1, round((rank - int(rank * common_fraction)) / count))
    return max(0, rank - per_task * count), per_task


def _beyond(whole: TruncatedSvd, common: TruncatedSvd) -> Tensor | None:
    """Return a basis of the outputs outside U_c if the sum spans all outputs, else None."""
    d_out, c = common.left.shape
    return whole.left[:, c:] if c < whole.rank == d_out else None


def _task_directions(
    update: Tensor, common: Tensor, beyond: Tensor | None, k: int, rule: RankRule
) -> TruncatedSvd:
    """Return the leading triplets of (I − U_cU_cᵀ)Δ; U is in the basis `beyond` if that is given."""
    if beyond is None:
        rows = torch.addmm(update, common, common.mT @ update, alpha=-1.0)
    else:
        rows = beyond.mT @ update
    return leading_svd(rows, k, replace(rule, scale=norm(update), shape=update.shape))
