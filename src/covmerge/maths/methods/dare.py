"""DARE: drop entries of the task vectors at random, rescale the rest, and merge by any method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.linalg.masks import at_least
from covmerge.maths.methods.elect import (
    ELECT_COST,
    CombineParameter,
    Density,
    Scale,
    TrimParameter,
    merge_agreeing,
    ranked_density,
    thresholds_of,
    trim_unit,
)
from covmerge.maths.methods.registry import (
    AXIS_BOUND,
    EntryCost,
    GlobalPass,
    Parameters,
    PerEntry,
    Reference,
    register,
)

_REFERENCE = Reference(
    title="Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free "
    "Lunch",
    authors=("Le Yu", "Bowen Yu", "Haiyang Yu", "Fei Huang", "Yongbin Li"),
    venue="ICML 2024",
    arxiv="2311.03099",
    equations="§3",
)
_LAWS = AXIS_BOUND.copies_give(None, "no multiple of its update: every expert loses other entries")

Drop = Annotated[float, Field(ge=0, lt=1, description="p, probability that an entry is dropped")]
Rescale = Annotated[bool, Field(description="multiply what is left by 1 / (1 − p)")]
Seed = Annotated[int, Field(ge=0, description="seed of the random masks")]


def sparsified(group: LinearGroup, *, drop: float, rescale: bool, seed: int) -> Iterator[Tensor]:
    """Yield Δ̃_t = (1 − m_t) ⊙ Δ_t [/ (1 − p)], m_t ~ Bernoulli(p), one expert after the other."""
    factor = 1.0 / (1.0 - drop) if rescale else 1.0
    for update, stream in zip(group.updates, group.streams, strict=True):
        mask = at_least(stream.uniform(seed, tuple(update.shape)), drop)
        yield mask.to(update.device, update.dtype).mul_(factor).mul_(update)


# Random numbers, the mask made of them, and the sparsified update of one expert.
_DRAW_COST = EntryCost(PerEntry(40), PerEntry(copies=1, bytes=4 + 4))
# The last expert's sparsified update is still held while the next one is made.
_COST = EntryCost(PerEntry(42), PerEntry(copies=2, bytes=4 + 4))


def _ties_cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    draw, elect = (cost(d_out, d_in, count, itemsize) for cost in (_DRAW_COST, ELECT_COST))
    sparse = count * d_out * d_in * itemsize
    return draw.then(elect) + Cost(0.0, sparse)


@register(
    "dare_task_arithmetic",
    equation="W̄ = W₀ + λ Σ w_t Δ̃_t,  Δ̃_t = (1 − m_t) ⊙ Δ_t / (1 − p),  m_t ~ Bernoulli(p)",
    reference=_REFERENCE,
    laws=_LAWS,
    cost=_COST,
    unit="element",
    published_tuning="p and λ, on labelled validation data",
)
def dare_task_arithmetic(
    group: LinearGroup,
    *,
    drop: Drop = 0.5,
    rescale: Rescale = True,
    scale: Scale = 0.3,
    seed: Seed = 0,
) -> Merged:
    """Add the scaled sum of task vectors whose entries were dropped at random.

    Δ̃_t = (1 − m_t) ⊙ Δ_t / (1 − p),  m_t ~ Bernoulli(p),  W̄ = W₀ + λ Σ w_t Δ̃_t  (DARE, §3)

    The paper shows that p = 0.9 costs language models little, and tunes p for its merges. p = 0.5 and
    λ = 0.3 are what its users publish without tuning (FusionBench). The masks depend only on `seed`, the
    tensor's name and the expert's name, not on order, blocks, device or threads.

    Args:
        group: updates of any one shape, with a stream of random numbers each; weights multiply the task
            vectors.
        rescale: whether the rest is rescaled to keep the expected value; the published command line
            leaves this off by default, its functions and the paper have it on.

    Departs from the paper: nowhere; p = 1, which leaves nothing, is refused.

    Example:
        >>> from covmerge.maths.linalg.random import Stream
        >>> group = LinearGroup((torch.ones(4, 16),), (1.0,), streams=(Stream("fc.weight/a"),))
        >>> dare_task_arithmetic(group, drop=0.5, scale=1.0).delta.unique().tolist()
        [0.0, 2.0]
    """
    total = torch.zeros_like(group.updates[0])
    vectors = sparsified(group, drop=drop, rescale=rescale, seed=seed)
    for vector, weight in zip(vectors, group.weights, strict=True):
        total.add_(vector, alpha=scale * weight)
    return Merged(total)


def _ranked_values(group: LinearGroup, parameters: Parameters) -> tuple[Tensor, ...]:
    drop, rescale, seed = parameters["drop"], parameters["rescale"], parameters["seed"]
    return tuple(sparsified(group, drop=drop, rescale=rescale, seed=seed))


@register(
    "dare_ties",
    equation="W̄ = W₀ + λ TIES(Δ̃_1, …, Δ̃_T),  Δ̃_t = (1 − m_t) ⊙ Δ_t / (1 − p),  m_t ~ Bernoulli(p)",
    reference=_REFERENCE,
    laws=_LAWS,
    cost=_ties_cost,
    unit=trim_unit,
    global_pass=GlobalPass(ranked_density, _ranked_values),
    published_tuning="p and λ, on labelled validation data",
)
def dare_ties(
    group: LinearGroup,
    *,
    drop: Drop = 0.5,
    rescale: Rescale = True,
    density: Density = 0.2,
    scale: Scale = 1.0,
    trim: TrimParameter = "global",
    merge: CombineParameter = "mean",
    seed: Seed = 0,
) -> Merged:
    """Drop entries of the task vectors at random, then merge the rest by TIES.

    Δ̃_t = (1 − m_t) ⊙ Δ_t / (1 − p),  m_t ~ Bernoulli(p)  (DARE, §3), then TIES' Algorithm 1

    The share that TIES keeps counts the dropped entries: if p ≥ 1 − density, TIES trims nothing more.
    The default p = 0.5 is that of FusionBench, the other defaults are those of `ties`.

    Args:
        group: updates of any one shape, with a stream of random numbers each; weights as in `ties`.
        density: share of all entries, dropped ones included, that TIES keeps.

    Departs from the paper: as `ties` where votes cancel exactly.

    Example:
        >>> from covmerge.maths.linalg.random import Stream
        >>> group = LinearGroup((torch.ones(4, 16),), (1.0,), streams=(Stream("fc.weight/a"),))
        >>> dare_ties(group, drop=0.5, density=1.0).delta.unique().tolist()
        [0.0, 2.0]
    """
    del trim  # `group.thresholds` come from the engine's global pass, which followed it
    vectors = tuple(sparsified(group, drop=drop, rescale=rescale, seed=seed))
    thresholds = group.thresholds or thresholds_of(vectors, density)
    merged = merge_agreeing(vectors, group.weights, thresholds=thresholds, combine=merge)
    return Merged(merged.mul_(scale))
