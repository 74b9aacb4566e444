"""The rows of the routers: a table of the ways to make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.moe.architectures import ARCHITECTURES, EMBEDDING
from covmerge.plan.moe.prompts import HiddenStates, last_states, mean_embeddings, mean_states
from covmerge.plan.moe.updates import OfUpdates
from covmerge.plan.recipe.sections import Mixture, Prompts

_NEARLY_DEPENDENT = 5.0  # condition number above which mergekit-moe warns too


@dataclass(frozen=True)
class Gates:
    """The routers of a mixture.

    Attributes:
        shape: of each: experts, and size of the hidden states.
        of: the router of a layer, float32, and below it the row of a shared expert that has one.
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
    def routed(self) -> list[str]:
        return self.moe.routed(self.experts)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.routed), self.sources[None].headers[EMBEDDING].shape[1]

    @property
    def prompts(self) -> list[Prompts]:
        """Of the routed experts, and of a shared one that has a gate."""
        shared = self.moe.shared
        names = [*self.routed, *([shared.expert] if shared is not None and shared.gated else ())]
        return [self.moe.prompts[name] for name in names]

    def drawn(self, draw: Callable[..., Tensor]) -> Tensor:
        """Numbers for all experts of all layers; for a shared one too, as mergekit-moe draws them."""
        shape = (self.layers, len(self.experts), self.shape[1])
        return draw(shape, generator=torch.Generator().manual_seed(self.moe.seed))


def gates_of(
    moe: Mixture, sources: Mapping[str | None, Checkpoint], experts: Sequence[str], layers: int
) -> Gates:
    """Return the routers of all layers.

    Args:
        moe: of the recipe.
        sources: the dense base (None), and its experts where they are read.
        experts: names of all, in order.
        layers: how many there are.
    """
    found = _WAYS[moe.gates](_Asked(moe, sources, experts, layers))
    if moe.prompted or not moe.prompts:
        return found
    unread = f"`gates: {moe.gates}` reads no prompts: those of the recipe have no part in it"
    return replace(found, notes=(*found.notes, unread))


def _normal(asked: _Asked) -> Gates:
    return _known(asked, asked.drawn(torch.randn))


def _uniform(asked: _Asked) -> Gates:
    bound = asked.shape[1] ** -0.5
    return _known(asked, asked.drawn(torch.rand) * 2 * bound - bound)


def _embedded(asked: _Asked) -> Gates:
    rows = mean_embeddings(asked.prompts, asked.sources[None])
    return _known(asked, rows.expand((asked.layers, *rows.shape)))


def _last(asked: _Asked) -> Gates:
    return Gates(asked.shape, HiddenStates(asked.prompts, asked.sources[None], last_states))


def _mean(asked: _Asked) -> Gates:
    return Gates(asked.shape, HiddenStates(asked.prompts, asked.sources[None], mean_states))


def _of_updates(asked: _Asked) -> Gates:
    norm = ARCHITECTURES[asked.moe.architecture].norm
    return Gates(asked.shape, OfUpdates(asked.sources, asked.routed, norm))


_WAYS: Mapping[str, Callable[[_Asked], Gates]] = MappingProxyType(
    {
        "cheap_embed": _embedded,
        "hidden": _last,
        "hidden_avg": _mean,
        "random": _normal,
        "uniform_random": _uniform,
        "update": _of_updates,
    }
)
_OTHER_PROMPTS = "write prompts that differ more, or add what the experts share as negative prompts"
_OTHER_EXPERTS = "leave one of two that learned alike out, or use `gates: cheap_embed` with prompts"


def _known(asked: _Asked, gates: Tensor) -> Gates:
    """Gates `(layers, experts, hidden)` that are there before any expert is read."""
    notes = warnings_of(gates[:, : asked.shape[0]], _OTHER_PROMPTS)
    return Gates(asked.shape, gates.__getitem__, notes)


def late_warnings(output: Checkpoint, moe: Mixture) -> list[str]:
    """Return a warning on the routers of an output that were made as they were read."""
    architecture = ARCHITECTURES[moe.architecture]
    names = [name for name in output.headers if architecture.is_gate(name)]
    if not names:  # a format with other names
        return []
    advice = _OTHER_EXPERTS if moe.gates == "update" else _OTHER_PROMPTS
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
