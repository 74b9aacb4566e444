"""DELLA-Merging: drop small entries more often than large ones, elect, fuse."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.errors import RecipeError
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.methods.elect import ELECT_COST, Scale, merge_agreeing
from covmerge.maths.methods.registry import AXIS_BOUND, Reference, register


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    size = d_out * d_in
    elect = ELECT_COST(d_out, d_in, count, itemsize)
    # Sorting holds magnitudes, their sorted copy and their places; sampling holds probabilities, random
    # numbers and the mask.
    sample = size * (3 * itemsize + 2 * 8 + 4 + 1)
    flops = count * size * (60.0 + 4.0 * max(1, d_in).bit_length())
    return elect.then(Cost(flops, sample)) + Cost(0.0, count * size * itemsize)


@register(
    "della",
    equation="W̄ = W₀ + λ mean of Δ̃_t over {t : sgn Δ̃_t = sgn Σ w_t Δ̃_t},  "
    "Δ̃_t = b_t ⊙ Δ_t / q_t,  b_t ~ Bernoulli(q_t), q_t by rank of |Δ_t| in its row",
    reference=Reference(
        title="DELLA-Merging: Reducing Interference in Model Merging through Magnitude-Based "
        "Sampling",
        venue="arXiv 2024",
        arxiv="2406.11617",
        equations="MAGPRUNE; Drop, Elect, Fuse",
    ),
    laws=AXIS_BOUND.copies_give(
        None, "no multiple of its update: every expert loses other entries"
    ),
    cost=_cost,
    unit="row",
    published_tuning="drop rate, window and λ, on labelled data",
)
def della(
    group: LinearGroup,
    *,
    density: Annotated[
        float, Field(gt=0, le=1, description="mean probability that an entry is kept")
    ] = 0.3,
    window: Annotated[
        float,
        Field(
            ge=0, lt=1, description="keep probability of a row's largest minus its smallest entry"
        ),
    ] = 0.2,
    scale: Scale = 1.1,
    seed: Annotated[int, Field(ge=0, description="seed of the random masks")] = 0,
) -> Merged:
    """Sample each row's entries by the rank of their magnitude, elect a sign, and fuse what agrees.

    q_t rises linearly with the rank of |Δ_t| in its row, from density − window/2 to
    density + window/2;  Δ̃_t = b_t ⊙ Δ_t / q_t,  b_t ~ Bernoulli(q_t)  (DELLA, MAGPRUNE);
    s = sgn Σ w_t Δ̃_t;  W̄ = W₀ + λ Σ_{sgn Δ̃_t = s} w_t Δ̃_t / Σ_{sgn Δ̃_t = s} w_t  (Elect, Fuse)

    The defaults are a drop rate of 0.7 and λ = 1.1, a little above 1 as in the published code. The
    masks depend only on `seed`, the tensor's name, the expert's name, and the magnitudes.

    Args:
        group: updates of any one shape, with a stream of random numbers each. A row is the part at one
            index of the first axis; a 1-D tensor is one row. A weight multiplies its expert's vote and its
            share of the mean.
        density: mean of q_t; 1 minus the paper's p.
        window: twice the ε of the paper's code.

    Raises:
        RecipeError: density ± window/2 leaves (0, 1].

    Departs from the paper: a row of one entry is kept with probability `density` (the published code
    divides 0 by 0). Where the votes cancel exactly, no sign is elected (published: the positive one).

    Example:
        >>> from covmerge.maths.linalg.random import Stream
        >>> row = torch.tensor([[4.0, 1.0, 2.0, 3.0]])
        >>> group = LinearGroup((row,), weights=(1.0,), streams=(Stream("fc.weight/a"),))
        >>> della(group, density=1.0, window=0.0, scale=1.0).delta.tolist()
        [[4.0, 1.0, 2.0, 3.0]]
    """
    if not (density - window / 2 > 0 and density + window / 2 <= 1):
        raise RecipeError(
            f"method 'della': density {density:g} ± window/2 = {window / 2:g} must stay within "
            "(0, 1]: an entry is divided by its probability; choose a smaller window"
        )
    vectors: list[Tensor] = []
    for update, stream in zip(group.updates, group.streams, strict=True):
        probability = keep_probability(update, density=density, window=window)
        numbers = stream.uniform(seed, tuple(update.shape)).to(update.device)
        mask = (probability - numbers).clamp_min_(0.0).sign_()
        vectors.append(mask.mul_(update).div_(probability))
    return Merged(merge_agreeing(vectors, group.weights).mul_(scale))


def keep_probability(update: Tensor, *, density: float, window: float) -> Tensor:
    """Return probabilities that rise linearly with the rank of |Δ| in its row.

    Example:
        >>> update = torch.tensor([[3.0, 1.0, -2.0]])
        >>> keep_probability(update, density=0.5, window=0.5).tolist()
        [[0.75, 0.25, 0.5]]
    """
    rows = update.flatten(1) if update.dim() > 1 else update.reshape(1, -1)
    width = rows.shape[1]
    if width < 2:
        return torch.full_like(update, density)
    lowest, highest = density - window / 2, density + window / 2
    ramp = torch.linspace(lowest, highest, width, dtype=rows.dtype, device=rows.device)
    # A stable sort, so that equal magnitudes have the same order on every machine.
    order = rows.abs().argsort(dim=1, stable=True)
    return torch.empty_like(rows).scatter_(1, order, ramp.expand_as(rows)).view_as(update)
