"""Layers for the campaign of numbers: each drawn by method, seed and number, choice by choice.

Every choice is drawn by random numbers of its own and can be left out, which puts the plain one in its
place, so that a layer that fails is made smaller without changing what remains of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, LowRank, Measured, Merged
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.random import Stream
from covmerge.maths.measures.rounding import rounding_of
from covmerge.maths.methods.factored import merge_factors
from covmerge.maths.reference import REFERENCES, STEP_REFERENCES
from covmerge.methods import Method, registry
from covmerge.steps import Step, resolve_steps, with_steps
from covmerge.steps import registry as steps
from tests.methods.groups import group_of
from tests.methods.variants import VARIANTS
from tests.steps.variants import VARIANTS as STEP_VARIANTS

KINDS = (
    *("full", "full", "full", "low rank", "graded", "zero", "one entry", "one row", "equal rows"),
    *("copy", "opposite", "folded", "hostile"),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGE = ((768, 768), (3072, 768), (768, 3072), (1, 3072), (3072, 1))
_ONCE_LARGE = 3000  # of so many layers one is large
_T = TypeVar("_T")


def subjects() -> list[str]:
    """Methods, and steps as `step NAME`."""
    return [*registry.names(), *(f"step {name}" for name in steps.names())]


@dataclass(frozen=True)
class Layer:
    """One input: which choices make it, and which of them are left out."""

    subject: str
    seed: int
    number: int
    without: frozenset[str] = frozenset()

    def _drawn(self, choice: str, plain: _T, draw: Callable[[Random], _T]) -> _T:
        if choice in self.without:
            return plain
        return draw(Random(f"{self.seed} {self.subject} {self.number} {choice}"))

    @property
    def choices(self) -> list[str]:
        """What can be left out, the largest parts first."""
        experts = [f"expert {t}" for t in range(1, self._most)]
        kinds = [f"kind {t}" for t in range(self._most)]
        rest = [
            "large",
            "shape",
            "scale",
            "dtype",
            "data",
            "factors",
            "weights",
            "sizes",
            "variant",
        ]
        return [choice for choice in [*experts, *rest, *kinds] if choice not in self.without]

    @property
    def step(self) -> Step | None:
        """The step that is looked at; None: a method."""
        return (
            steps.get(self.subject.removeprefix("step ")) if self.subject[:5] == "step " else None
        )

    @cached_property
    def method(self) -> Method:
        """The method, or a mean with the step around it."""
        if self.step is None:
            return registry.get(self.subject)
        use = resolve_steps([{self.step.name: dict(self.parameters)}], self.step.when)
        return with_steps(
            registry.get("average"), *((use, []) if self.step.when == "before" else ([], use))
        )

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Those that are given; the others are the defaults."""
        every = STEP_VARIANTS if self.step is not None else VARIANTS
        own = [given for name, given in every if name == self.subject.removeprefix("step ")]
        return dict(self._drawn("variant", own[0], lambda random: random.choice(own)))

    @property
    def _most(self) -> int:
        # Most methods take any number; 64 experts are drawn now and then, of small layers.
        drawn = Random(f"{self.seed} {self.subject} {self.number} experts")
        count = drawn.choice((1, 2, 2, 3, 3, 4, 5, 8)) if drawn.random() < 0.97 else 64
        least, most = registry.get(self.subject).experts if self.step is None else (1, None)
        return max(least, min(count, most or count))

    @property
    def shape(self) -> tuple[int, int]:
        """`(d_out, d_in)`."""
        large = self._drawn("large", None, lambda random: _large(random, self._most))
        if large is not None:
            return large
        return self._drawn("shape", (4, 4), _small)

    @property
    def dtype(self) -> torch.dtype:
        """That the updates are stored in."""
        return self._drawn("dtype", torch.float64, lambda random: random.choice(DTYPES))

    @property
    def computed(self) -> torch.dtype:
        """That they are merged in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def arithmetic(self) -> torch.dtype:
        """That decides the digits: a method on weights may have one of its own."""
        named = self.resolved.get("arithmetic")
        if self.subject == "ram" and self.resolved["boost"]:
            return torch.float32  # λ_t is a ratio in float32, as mergekit's
        return self.computed if named is None else getattr(torch, named)

    @property
    def scale(self) -> float:
        """The size of all updates together."""
        largest = 2.0 if self.dtype == torch.float16 else 30.0
        return self._drawn(
            "scale",
            1.0,
            lambda random: 10.0 ** random.choice((0.0, random.uniform(-largest, largest))),
        )

    @property
    def updates(self) -> list[Tensor]:
        """Δ_t in the dtype that is computed in, from numbers of the dtype that is stored."""
        made: list[Tensor] = []
        for t in range(self._most):
            if t and f"expert {t}" in self.without and len(made) >= self.method.experts[0]:
                continue
            kind = self._drawn(f"kind {t}", "full", lambda random: random.choice(KINDS))
            size = self._drawn("sizes", 1.0, lambda random: _size(random, t))  # noqa: B023
            generator = torch.Generator().manual_seed(1000 * self.number + t)
            made.append(size * one(kind, self.shape, generator, made, self.dtype))
        most = torch.finfo(self.dtype).max / 2
        held = [(self.scale * update).clamp(-most, most) for update in made]
        return [update.to(self.dtype).to(self.computed) for update in held]

    @property
    def by_factors(self) -> bool:
        """Whether the updates come as the factors of adapters, where the method is exact on them."""
        asked = self._drawn("factors", False, lambda random: random.random() < 0.2)
        return asked and self.step is None and self.method.factored_for(self.resolved)

    @property
    def resolved(self) -> dict[str, Any]:
        """All parameters of the method that runs."""
        return registry.get("average" if self.step else self.subject).resolve(
            {} if self.step else self.parameters
        )

    @cached_property
    def group(self) -> LinearGroup:
        """The updates, with all that the method asks for beside them."""
        updates = self.updates
        weights = self._drawn(
            "weights",
            [1.0],
            lambda random: [random.choice((1.0, 1.0, 0.5, 3.0)) for _ in range(64)],
        )
        group = group_of(self.method, updates, (64 * weights)[: len(updates)])
        if group.base is not None:
            # As large as the updates, or a thousand times that.
            far = self._drawn("sizes", 1.0, lambda random: random.choice((1.0, 1.0, 1e3)))
            base = (group.base.double() * self.scale * far / norm(group.base) * 2).to(self.computed)
            models = tuple(base + update for update in updates) if group.models else ()
            group = replace(group, base=base, models=models)
        kind = self._drawn(
            "data", "full", lambda random: random.choice(("full", "full", "few", "none"))
        )
        # RegMean as published has no answer where data leave the system singular, and says so (`jitter`).
        regular = self.subject.startswith("regmean") and self.resolved["off_diagonal"] == 1.0
        if kind != "full" and self.method.data == "gram" and not regular:
            group = replace(
                group,
                expert_statistics=tuple(_poorer(own, kind) for own in group.expert_statistics),
            )
        if self.dtype != self.computed and not group.models:
            group = replace(group, rounding=rounding_of(updates, [self.dtype] * len(updates)))
        if self.by_factors:
            group = replace(group, factors=tuple(map(_factors, updates)), rounding=())
        return group

    def merged(self, group: LinearGroup) -> Tensor:
        """What covmerge makes of it: the merged update, or what a step before a method makes."""
        if group.factors and self.step is None:
            found = merge_factors(
                self.method,
                group.factors,
                group.weights,
                self.resolved,
                measured=group.expert_statistics,
            )
            return found.delta.dense().to(self.computed)
        if self.step is not None and self.step.when == "before":
            return torch.stack(self.step.prepare(group, self.step.resolve(self.parameters)).updates)
        if self.step is not None:
            given = self.step.resolve(self.parameters)
            return self.step.finish(group, Merged(_mean(group)), given).delta
        return self.method(group, **self.resolved).delta

    def reference(self, group: LinearGroup) -> Tensor:
        """The same by the equation in float64."""
        if group.factors:
            exact = tuple(each.to(torch.float64).dense() for each in group.factors)
            group = replace(group, updates=exact)
        if self.step is None:
            found = REFERENCES[self.subject](group, **self.parameters)
            return found - group.base.double() if group.models and group.base is not None else found
        own = STEP_REFERENCES[self.step.name]
        if self.step.when == "before":
            return torch.stack(own(group, **self.parameters))
        return own(group, _mean(group), **self.parameters)


def one(
    kind: str,
    shape: tuple[int, int],
    generator: torch.Generator,
    before: Sequence[Tensor],
    stored: torch.dtype,
) -> Tensor:
    """One update of norm about 1, float64; `before` are those of the other experts."""

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    full = random(*shape)
    if kind in ("low rank", "folded"):
        rank = 1 + int(torch.randint(0, max(1, min(shape) // 4), (1,), generator=generator))
        full = random(shape[0], rank) @ random(rank, shape[1])
    elif kind == "graded":
        U, S, Vh = torch.linalg.svd(full, full_matrices=False)
        full = U @ torch.diag(torch.logspace(0, -8, len(S), dtype=torch.float64)) @ Vh
    elif kind == "zero":
        return torch.zeros_like(full)
    elif kind == "one entry":
        full = torch.zeros_like(full)
        full[shape[0] // 2, shape[1] // 3] = 1.0
    elif kind == "one row":
        full[1:] = 0.0
    elif kind == "equal rows":
        full = full[:1].expand(shape).clone()
    elif kind in ("copy", "opposite") and before and before[0].any():
        return before[0].clone() if kind == "copy" else -before[0]
    full = full / full.norm()
    if kind == "hostile":
        return 1e6 * full
    if kind == "folded":  # an adapter that was added to weights of its dtype
        base = random(*shape).to(stored)
        full = (base.double() + full).to(stored).double() - base.double()
    return full


def _small(random: Random) -> tuple[int, int]:
    short, long = (round(exp(random.uniform(0, log(most)))) for most in (24, 48))
    return (short, long) if random.random() < 0.5 else (long, short)


def _large(random: Random, experts: int) -> tuple[int, int] | None:
    if random.randrange(_ONCE_LARGE) or experts > 5:
        return None
    return random.choice(LARGE)


def _size(random: Random, expert: int) -> float:
    sizes = [random.choice((1.0, 1.0, 1.0, 0.5, 2.0, 30.0, 1e-3)) for _ in range(expert + 1)]
    return sizes[-1]


def _factors(update: Tensor) -> LowRank:
    """Its singular vectors, as many as it has: a dense matrix as an adapter."""
    U, S, Vh = torch.linalg.svd(update.double(), full_matrices=False)
    root = S.sqrt()
    return LowRank(U * root, root[:, None] * Vh).to(update.dtype)


def _mean(group: LinearGroup) -> Tensor:
    """What a step after a method is given: rounded, as methods round it."""
    return registry.get("average")(group).delta


def _poorer(measured: Measured, kind: str) -> Measured:
    """Data of two inputs, or of none."""
    if kind == "none":
        return replace(measured, value=torch.zeros_like(measured.value), total=0.0)
    rows = measured.value[:2]
    value = rows.T @ rows
    return replace(measured, value=value, total=norm(value))


def rows_of(group: LinearGroup, rows: slice) -> LinearGroup:
    """Some rows of a layer, as the engine cuts them."""
    first = (rows.start or 0) * group.tensors[0].shape[1]
    return replace(
        group,
        updates=tuple(update[rows] for update in group.updates),
        models=tuple(model[rows] for model in group.models),
        streams=tuple(Stream(f"tensor/expert{t}", first) for t in range(len(group.tensors))),
        expert_statistics=tuple(
            replace(own, value=own.value[rows]) for own in group.expert_statistics
        ),
        base=None if group.base is None else group.base[rows],
    )
