"""The subject of a check, its input, and the error for a law that does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.layer import merge_layer
from covmerge.maths.methods import Method, registry
from covmerge.maths.steps import Steps, with_steps
from covmerge.maths.steps.compose import steps_around
from covmerge.maths.testing.groups import group_of, random_updates


class Broken(AssertionError):
    """A law that does not hold: which law, on which input, and the result."""


@dataclass(frozen=True)
class Subject:
    """A method at its default parameters, alone or with steps around it."""

    name: str
    before: Steps = ()
    after: Steps = ()

    @cached_property
    def method(self) -> Method:
        """The method and its steps as one method."""
        return with_steps(registry.get(self.name), *steps_around(self.before, self.after))

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The method's default parameters."""
        return registry.get(self.name).resolve({})

    @property
    def stepped(self) -> bool:
        """Whether there are steps."""
        return bool(self.before or self.after)

    def case(self, shape: tuple[int, int]) -> Case:
        """Return random updates, of four experts if the method allows that number."""
        least, most = self.method.experts
        return Case(shape, count=max(least, min(Case.count, most or Case.count)))

    def group(
        self, updates: Sequence[Tensor], weights: Sequence[float] | None = None
    ) -> LinearGroup:
        """Return a group with the updates and everything else that the method may need."""
        return group_of(self.method, updates, weights)

    def merge(self, group: LinearGroup, **given: Any) -> Tensor:
        """Return the merged update of a group; `given` are parameters that replace defaults."""
        return self.method(group, **{**self.given, **given}).delta

    def merged(self, updates: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
        """Return the merged update of some updates."""
        return self.merge(self.group(updates, weights))

    def layer(self, updates: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
        """Return the merged update by `merge_layer`, which computes half precision in float32."""
        # Data keep their own precision.
        group = self.group([u.to(torch.promote_types(u.dtype, torch.float32)) for u in updates])
        return merge_layer(
            updates,
            self.name,
            weights=weights,
            data=[measured.value for measured in group.expert_statistics],
            base=group.base,
            # Strange updates may have few digits in float64, and are exact all the same.
            stored=torch.float64 if updates[0].dtype == torch.float64 else None,
            before=self.before,
            after=self.after,
        )


@dataclass(frozen=True)
class Case:
    """Random updates of usual sizes, float64."""

    shape: tuple[int, int]  # shape of each update
    count: int = 4  # number of experts; their norms spread over a factor of 3
    seed: int = 3  # seed of the random numbers

    @cached_property
    def updates(self) -> list[Tensor]:
        """The updates."""
        return random_updates(
            *self.shape, count=self.count, rank=min(self.shape), spread=3.0, seed=self.seed
        )

    def __str__(self) -> str:
        d_out, d_in = self.shape
        return (
            f"groups.random_updates({d_out}, {d_in}, count={self.count}, rank={min(self.shape)}, "
            f"spread=3.0, seed={self.seed})"
        )


def expect(holds: bool, what: str) -> None:
    """Raise an error with the result unless a condition holds.

    Raises:
        Broken: the condition does not hold.
    """
    if not holds:
        raise Broken(what)
