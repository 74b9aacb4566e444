"""SCE: select entries by variance, calculate weights by energy, erase the minority's signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.lapack import exponent_of
from covmerge.maths.methods.arithmetic import ArithmeticParameter, inputs_of
from covmerge.maths.methods.gathered import Made, TensorInBlocks, one_buffer
from covmerge.maths.methods.registry import (
    AXIS_BOUND_UP_TO_BOUNDS,
    EntryCost,
    Groups,
    Parameters,
    PerEntry,
    Reference,
    TensorPass,
    register,
)

# Dtypes in which squares may overflow, and the exponent from which updates are scaled. Half precision is
# not scaled, so that it rounds as in mergekit.
_WIDE, _FAR = (torch.float32, torch.float64), 20
_NO_ENERGY = 1e-6  # a smaller sum of mean squares gives uniform weights; also the least divisor


@dataclass(frozen=True)
class _Selected:
    """Facts about the whole tensor that the computation of its rows needs."""

    shares: Tensor  # w_t
    mask: Tensor | None  # the entries that are kept, flattened; None: all
    width: int  # the number of entries of a row

    def rows(self, rows: range) -> tuple[Tensor, Tensor | None]:
        """Return the shares, and the mask of some rows."""
        if self.mask is None:
            return self.shares, None
        return self.shares, self.mask[rows.start * self.width : rows.stop * self.width]


def _tensor_pass(groups: Groups, shape: Sequence[int], parameters: Parameters) -> _Selected:
    whole = TensorInBlocks(groups, prod(shape), parameters["arithmetic"])
    mask = None
    if parameters["select_topk"] < 1:
        mask = _most_varied_of(whole, parameters["select_topk"])
    count = len(next(whole.blocks())[2])

    def square(part: slice, base: Tensor, models: Sequence[Tensor]) -> Tensor:
        update = (models[0] - base).reshape(-1)
        return (update if mask is None else update * mask[part].to(update.dtype)).square()

    squares = whole.gathered([Made((t,), square) for t in range(count)])
    energy = torch.cat([squared.view(1, -1).mean(dim=1) for squared in squares])
    return _Selected(_shares(energy), mask, prod(shape[1:]))


def _entry_bytes(parameters: Parameters) -> float:
    """Return the bytes per entry: the variance, sorted too, or one expert's squares; and the mask."""
    gathered = one_buffer(parameters["arithmetic"])
    return 3 * gathered + 2 if parameters["select_topk"] < 1 else gathered


@register(
    "sce",
    equation="W̄ = W₀ + Σ w_t M_t Δ_t / max(Σ w_t M_t, 10⁻⁶),  w_t ∝ mean Δ_t²,  M_t = [sgn Δ_t = elected]",
    reference=Reference(
        title="FuseChat: Knowledge Fusion of Chat Models",
        venue="arXiv 2024",
        arxiv="2408.07990",
        equations="SCE: Select, Calculate, Erase",
    ),
    laws=AXIS_BOUND_UP_TO_BOUNDS.copies_give(1.0, "the expert"),
    cost=EntryCost(PerEntry(40, copies=3), PerEntry(copies=3, bytes=8)),
    unit="tensor",
    tensor_pass=TensorPass(_tensor_pass, _entry_bytes, together=True),
    sees="weights",
    weighted=False,
)
def sce(
    group: LinearGroup,
    *,
    select_topk: Annotated[
        float,
        Field(
            ge=0,
            description="share of the entries whose variance over experts is not 0, by variance",
        ),
    ] = 1.0,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Keep the entries that vary most, weigh experts by their energy, and drop the minority's signs.

    S: the ⌊k · #{var > 0}⌋ entries of largest variance over experts; w_t = mean (S Δ_t)² over their
    sum; γ = sgn Σ S Δ_t (+ where it is 0), M_t = [sgn S Δ_t = γ];
    W̄ = W₀ + Σ w_t M_t S Δ_t / max(Σ w_t M_t, 1e-6)  (SCE)

    If Σ mean (S Δ_t)² is below 1e-6, as for most fine-tunes, all w_t are 1/T. The experts' weights in the
    recipe have no effect.

    Args:
        group: models of any one shape.
        select_topk: k; 1 or more keeps all entries.

    Departs from the paper: there are two floors of 1e-6, and the sign is elected by the sum of the updates,
    both as in mergekit, whose result this is.

    Example:
        >>> import torch
        >>> models = (torch.tensor([3.0, 1.0]), torch.tensor([1.0, -1.0]))
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(2), models=models)
        >>> [round(x, 4) for x in sce(group).tolist()]
        [2.6667, 1.0]
    """
    base, models = inputs_of(group, arithmetic)
    updates = torch.stack([model - base for model in models])
    if not updates.numel():
        return group.models[0].clone()
    shares, mask = group.known[0] if group.known else (None, None)
    if mask is None and shares is None and select_topk < 1:
        mask = _largest(_variance(updates, _exponent([updates])), select_topk)
    if mask is not None:
        updates = updates * mask.view(base.shape).to(updates.dtype)
    elected = (updates.sum(dim=0) >= 0).to(base.dtype) * 2 - 1
    agreed = updates.sign() == elected
    if shares is None:
        shares = _shares(updates.square().reshape(len(models), -1).mean(dim=1))
    given = shares.view(-1, *[1] * base.dim()) * agreed
    merged = (updates * given).sum(dim=0) / given.sum(dim=0).clamp(min=_NO_ENERGY)
    return (base + merged).to(group.models[0].dtype)


def _shares(energy: Tensor) -> Tensor:
    total = float(energy.sum())
    uniform = torch.ones_like(energy) / len(energy)
    return uniform if abs(total) < _NO_ENERGY else energy / total


def _most_varied_of(whole: TensorInBlocks, share: float) -> Tensor:
    """Return `_largest` of the variance of a tensor that comes in blocks."""
    largest = [
        torch.stack([(model - base).abs().amax() for model in models])
        for _, base, models in whole.blocks()
    ]
    exponent = _exponent(largest)

    def variance(part: slice, base: Tensor, models: Sequence[Tensor]) -> Tensor:
        return _variance(torch.stack([model - base for model in models]), exponent)

    (found,) = whole.gathered([Made(tuple(range(len(largest[0]))), variance)])
    return _largest(found, share)


def _exponent(updates: Sequence[Tensor]) -> int:
    """Return the exponent of the largest entry if squares may leave the dtype, else 0."""
    exponent = exponent_of(updates) if updates[0].dtype in _WIDE else 0
    return exponent if abs(exponent) > _FAR else 0


def _variance(updates: Tensor, exponent: int) -> Tensor:
    """Return the variance of each entry over the experts."""
    if exponent:
        updates = updates * 2.0**-exponent  # changes no digit, and squares stay in the dtype
    return updates.var(dim=0, unbiased=False)


def _largest(variance: Tensor, share: float) -> Tensor:
    """Return the mask of the entries with the largest variances, flattened."""
    flat = variance.reshape(-1)
    count = int(torch.count_nonzero(flat) * share)
    mask = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    if count:
        exact = torch.promote_types(flat.dtype, torch.float32)  # NumPy has no bfloat16
        ordered = np.partition(flat.to(exact).cpu().numpy(), len(flat) - count)
        least = float(ordered[len(flat) - count])
        del ordered
        mask = flat >= least
        if int(mask.sum()) > count:  # keep those of the equal ones that torch takes
            mask.zero_()
            mask[torch.topk(flat, count).indices] = True
    return mask
