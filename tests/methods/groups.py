"""Layers for tests: updates with all that a method may ask for beside them."""

from dataclasses import replace

import torch

from covmerge.linalg.random import Stream
from covmerge.types import LinearGroup, Measured


def random_updates(d_out, d_in, count, rank, spread, seed, dtype=torch.float64):
    """Updates of a given rank whose norms spread over a factor."""
    generator = torch.Generator().manual_seed(seed)
    updates = []
    for t in range(count):
        left = torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
        right = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
        update = left @ right
        norm = 0.3 * spread ** (t / max(1, count - 1)) / spread**0.5
        updates.append((update * norm / update.norm()).to(dtype))
    return updates


def group_of(method, updates, weights=None, **given):
    """A group with streams, and with random statistics where the method wants data."""
    d_in = updates[0].shape[-1]
    generator = torch.Generator().manual_seed(100)
    measured = []
    for update in updates:
        if method.data == "gram":
            inputs = torch.randn(3 * d_in, d_in, generator=generator, dtype=torch.float64)
            value = inputs.T @ inputs / len(inputs)
        elif method.data == "fisher":
            value = torch.rand(update.shape, generator=generator, dtype=torch.float64) + 0.1
        else:
            continue
        measured.append(Measured(value.to(update), rows=3 * d_in, total=float(value.norm())))
    return LinearGroup(
        updates=tuple(updates),
        weights=tuple(weights or [1.0] * len(updates)),
        streams=tuple(Stream(f"tensor/expert{t}") for t in range(len(updates))),
        measured=tuple(measured),
        **given,
    )


def permuted(group, order):
    """The same experts in another order."""

    def take(values):
        return tuple(values[t] for t in order) if values else values

    return replace(
        group,
        updates=take(group.updates),
        weights=take(group.weights),
        streams=take(group.streams),
        measured=take(group.measured),
        thresholds=take(group.thresholds),
    )


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def random_rotation(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
