"""Unusual updates: a method must give a finite result, or an error that names it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.maths.linalg.lapack import norm, svd
from covmerge.maths.testing.subject import Subject, expect

SHAPES = ((1, 1), (1, 7), (7, 1), (2, 2), (3, 20), (20, 3), (12, 12), (24, 16), (5, 40))
KINDS = ("full", "low", "zero", "copy", "opposite", "orthogonal", "one entry", "one row", "graded")
SIZES = (0.3, 0.3, 30.0, 3e-4, 3e-7)
EXPONENTS = (-100, -60, -25, 25, 60, 100)

Experts = Sequence[tuple[str, float]]  # each expert's kind and norm


def strange_updates(shape: tuple[int, int], experts: Experts, seed: int) -> list[Tensor]:
    """Return updates of the named kinds and norms, float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    updates: list[Tensor] = []
    for kind, size in experts:
        update = random(*shape)
        left, sigma, right = svd(update)
        if kind == "low":
            update = random(shape[0], 1) @ random(1, shape[1])
        elif kind == "orthogonal":
            update = left @ right
        elif kind == "graded":
            update = left @ torch.diag(torch.logspace(0, -5, len(sigma)).double()) @ right
        elif kind == "one entry":
            update = torch.zeros_like(update)
            update[-1, 0] = 1.0
        elif kind == "one row":
            update = update[:1].expand(shape).clone()
        update *= size / norm(update)
        if kind == "zero":
            update = torch.zeros_like(update)
        elif kind in ("copy", "opposite") and updates:
            update = updates[0].clone() if kind == "copy" else -updates[0]
        updates.append(update)
    return updates


def drawn(seed: int) -> tuple[tuple[int, int], Experts]:
    """Return a shape and some experts, drawn by a seed."""
    draw = Random(seed)
    experts = [(draw.choice(KINDS), draw.choice(SIZES)) for _ in range(draw.randint(1, 5))]
    return draw.choice(SHAPES), experts


def merge_strange(
    subject: Subject, updates: Sequence[Tensor], weights: Sequence[float] | None = None
) -> Tensor | None:
    """Return the merged update, or None if an error that names the method refuses the updates.

    Raises:
        Broken: the result is not finite or not in the updates' dtype, or the error does not name the
            method.
    """
    try:
        merged = subject.layer(updates, weights)
    except TensorError as error:
        named = f"method '{subject.method.name}'" in str(error) or "`eps`" in str(error)
        named = named or any(f"'{name}'" in str(error) for name in _step_names(subject))
        expect(named, f"an error that does not name the method: {error}")
        return None
    expect(merged.dtype == updates[0].dtype, f"{updates[0].dtype} updates give {merged.dtype}")
    expect(bool(torch.isfinite(merged).all()), "it gives NaN or Inf from finite updates")
    return merged.double()


def _step_names(subject: Subject) -> list[str]:
    entries = (*subject.before, *subject.after)
    return [e if isinstance(e, str) else next(iter(e)) for e in entries]


def is_arbitrary(subject: Subject, updates: Sequence[Tensor]) -> bool:
    """Return whether the method says that rounding decides its result (`Diagnostics.arbitrary_result`)."""
    method = subject.method
    merged = method(subject.group(updates), **subject.given)
    return method.diagnostics.from_json(merged.stats).arbitrary_result


def apart(one: Tensor, other: Tensor, updates: Sequence[Tensor]) -> float:
    """Return the distance relative to the result, or to the updates if the experts cancel."""
    size = max(map(norm, updates))
    return norm(one - other) / max(norm(other), 1e-6 * size, 1e-300)


def of_any_size(subject: Subject, updates: Sequence[Tensor], exponent: int) -> None:
    """Check that updates of any size are merged or refused; to the same digits if scale is promised.

    Raises:
        Broken: that does not hold.
    """
    singles = [update.float() for update in updates]
    merge_strange(subject, [update * 2.0**exponent for update in singles])
    wide = [update.double() * 2.0 ** (4 * exponent) for update in singles]
    merged = merge_strange(subject, wide)
    expected = merge_strange(subject, [update.double() for update in singles])
    # A method that sees weights has an update only to the weights' digits.
    promised = subject.method.laws.scale_equivariant and subject.method.sees == "updates"
    if promised and not is_arbitrary(subject, wide):
        expect(
            merged is not None and expected is not None,
            f"scale is promised, and updates times 2^{4 * exponent} are refused",
        )
        assert merged is not None and expected is not None
        off = apart(merged * 2.0 ** (-4 * exponent), expected, singles)
        expect(off < 1e-6, f"updates times 2^{4 * exponent} give another result: off by {off:.2g}")
