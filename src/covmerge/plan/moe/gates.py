"""The rows of the routers: one function for each way to make them."""

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
        shape: shape of each: number of experts, size of the hidden states.
        of: function that returns the router of a layer, float32; a last row is the gate of a shared
            expert.
        notes: notes for the user.
    """

    shape: tuple[int, int]
    of: Callable[[int], Tensor]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _Asked:
    """The inputs of routers: the recipe's section, the base (None), its experts and number of layers."""

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
        """The prompts of the routed experts, and of a shared expert that has a gate."""
        shared = self.moe.shared
        names = [*self.routed, *([shared.expert] if shared is not None and shared.gated else ())]
        return [self.moe.prompts[name] for name in names]

    def drawn(self, draw: Callable[..., Tensor]) -> Tensor:
        """Return random numbers for all experts of all layers, a shared one too, as in mergekit-moe."""
        shape = (self.layers, len(self.experts), self.shape[1])
        return draw(shape, generator=torch.Generator().manual_seed(self.moe.seed))


def gates_of(
    moe: Mixture, sources: Mapping[str | None, Checkpoint], experts: Sequence[str], layers: int
) -> Gates:
    """Return the routers of all layers.

    Args:
        moe: section of the recipe.
        sources: the dense base (None), and its experts if they are read.
        experts: names of all experts, in order.
        layers: number of layers.
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
    """Return gates `(layers, experts, hidden)` that are computed before any expert is read."""
    notes = warnings_of(gates[:, : asked.shape[0]], _OTHER_PROMPTS)
    return Gates(asked.shape, gates.__getitem__, notes)


def late_warnings(output: Checkpoint, moe: Mixture) -> list[str]:
    """Return a warning about the routers of an output, which were computed while tensors were read."""
    architecture = ARCHITECTURES[moe.architecture]
    names = [name for name in output.headers if architecture.is_gate(name)]
    if not names:  # the output's format has other names
        return []
    advice = _OTHER_EXPERTS if moe.gates == "update" else _OTHER_PROMPTS
    return warnings_of(torch.stack([output.read(name).float() for name in names]), advice)


def warnings_of(gates: Tensor, advice: str) -> list[str]:
    """Return a warning if the gates of a layer `(layers, experts, hidden)` are nearly dependent."""
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
