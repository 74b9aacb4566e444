"""Layers for the checks: updates with everything else that a method may need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Measured
from covmerge.maths.linalg.lapack import norm, qr
from covmerge.maths.linalg.random import Stream
from covmerge.maths.methods import Method

_T = TypeVar("_T")


def random_updates(
    d_out: int,
    d_in: int,
    count: int,
    rank: int,
    spread: float,
    seed: int,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return updates of a given rank, whose norms spread over a factor."""
    generator = torch.Generator().manual_seed(seed)
    updates: list[Tensor] = []
    for t in range(count):
        left = torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
        right = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
        update = left @ right
        size = 0.3 * spread ** (t / max(1, count - 1)) / spread**0.5
        updates.append((update * size / norm(update)).to(dtype))
    return updates


def group_of(
    method: Method,
    updates: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    **given: Any,
) -> LinearGroup:
    """Return a group with streams, and random statistics and a random base if the method needs them."""
    d_in = updates[0].shape[-1]
    generator = torch.Generator().manual_seed(100)
    measured: list[Measured] = []
    for update in updates:
        if method.data == "gram":
            inputs = torch.randn(3 * d_in, d_in, generator=generator, dtype=torch.float64)
            value = inputs.T @ inputs / len(inputs)
        elif method.data == "fisher":
            value = torch.rand(update.shape, generator=generator, dtype=torch.float64) + 0.1
        else:
            continue
        measured.append(Measured(value.to(update), rows=3 * d_in, total=norm(value)))
    base = None
    if method.needs_base:
        base = torch.randn(updates[0].shape, generator=generator, dtype=torch.float64)
    start = None if base is None else base.to(updates[0])
    models = () if start is None or method.sees == "updates" else [start + u for u in updates]
    return LinearGroup(
        updates=() if models else tuple(updates),
        models=tuple(models),
        weights=tuple(weights or [1.0] * len(updates)),
        streams=tuple(Stream(f"tensor/expert{t}") for t in range(len(updates))),
        expert_statistics=tuple(measured),
        base=start,
        **given,
    )


def permuted(group: LinearGroup, order: Sequence[int]) -> LinearGroup:
    """Return the group with its experts in another order."""

    def take(values: tuple[_T, ...]) -> tuple[_T, ...]:
        return tuple(values[t] for t in order) if values else values

    return replace(
        group,
        updates=take(group.updates),
        models=take(group.models),
        weights=take(group.weights),
        streams=take(group.streams),
        expert_statistics=take(group.expert_statistics),
        thresholds=None if group.thresholds is None else take(group.thresholds),
        factors=take(group.factors),
        rounding=take(group.rounding),
    )


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return ‖actual − expected‖ / ‖expected‖."""
    return norm(actual.double() - expected) / max(norm(expected), 1e-30)


def random_rotation(size: int, seed: int) -> Tensor:
    """Return an orthogonal matrix."""
    generator = torch.Generator().manual_seed(seed)
    return qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
