"""The rows of the routers: a table of the ways to make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.moe.architectures import ARCHITECTURES, EMBEDDING
from covmerge.plan.moe.prompts import rows_of_prompts
from covmerge.plan.moe.updates import OfUpdates
from covmerge.plan.recipe.sections import Mixture

_NEARLY_DEPENDENT = 5.0  # condition number above which mergekit-moe warns too


@dataclass(frozen=True)
class Gates:
    """The routers of a mixture.

    Attributes:
        shape: of each: experts, and size of the hidden states.
        of: the router of a layer, float32.
        notes: what there is to say of them.
    """

    shape: tuple[int, int]
    of: Callable[[int], Tensor]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _Asked:
    """What they are made of: the recipe's section, the base (None) and its experts, and how many layers."""

    moe: Mixture
    sources: Mapping[str | None, Checkpoint]
    experts: Sequence[str]
    layers: int

    @property
    def hidden(self) -> int:
        return self.sources[None].headers[EMBEDDING].shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.experts), self.hidden

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.moe.seed)


def gates_of(
    moe: Mixture, sources: Mapping[str | None, Checkpoint], experts: Sequence[str], layers: int
) -> Gates:
    """Return the routers of all layers.

    Args:
        moe: of the recipe.
        sources: the dense base (None), and its experts where they are read.
        experts: names of all, in order.
        layers: how many there are.

    Raises:
        InputError: the base has no tokenizer, or a prompt is nothing to it.
    """
    return _WAYS[moe.gates](_Asked(moe, sources, experts, layers))


def _normal(asked: _Asked) -> Gates:
    return _known(torch.randn((asked.layers, *asked.shape), generator=asked.generator))


def _uniform(asked: _Asked) -> Gates:
    bound = asked.hidden**-0.5
    unit = torch.rand((asked.layers, *asked.shape), generator=asked.generator)
    return _known(unit * 2 * bound - bound)


def _prompted(asked: _Asked) -> Gates:
    rows = rows_of_prompts(asked.moe.prompts, asked.experts, asked.sources[None])
    return _known(rows.expand((asked.layers, *asked.shape)))


def _of_updates(asked: _Asked) -> Gates:
    return Gates(asked.shape, OfUpdates(asked.sources, asked.experts))


_WAYS: Mapping[str, Callable[[_Asked], Gates]] = MappingProxyType(
    {
        "cheap_embed": _prompted,
        "random": _normal,
        "uniform_random": _uniform,
        "update": _of_updates,
    }
)


def _known(gates: Tensor) -> Gates:
    """Gates `(layers, experts, hidden)` that are there before any expert is read."""
    _, experts, hidden = gates.shape
    notes = warnings_of(
        gates, "write prompts that differ more, or add what the experts share as negative prompts"
    )
    return Gates((experts, hidden), gates.__getitem__, notes)


def warnings_of_updates(output: Checkpoint, architecture: str) -> list[str]:
    """Return a warning on the routers of an output that were made of updates, and are known by now."""
    names = [name for name in output.headers if ARCHITECTURES[architecture].is_gate(name)]
    if not names:  # a format with other names
        return []
    advice = "leave one of two that learned alike out, or use `gates: cheap_embed` with prompts"
    return warnings_of(torch.stack([output.read(name).float() for name in names]), advice)


def warnings_of(gates: Tensor, advice: str) -> list[str]:
    """Return a warning where the gates of a layer `(layers, experts, hidden)` are nearly dependent."""
    linalg = cast("Any", torch.linalg)
    conditions: list[float] = linalg.cond(gates.double()).tolist()
    worst = max(conditions)
    if worst <= _NEARLY_DEPENDENT:
        return []
    count = sum(condition > _NEARLY_DEPENDENT for condition in conditions)
    return [
        f"the gates are nearly dependent in {count} of {len(conditions)} layers (condition number up to "
        f"{worst:.3g}; {_NEARLY_DEPENDENT:g} is much), so some experts will seldom be chosen: {advice}"
    ]
