"""The rows of the routers: one function for each way to make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.moe.architectures import ARCHITECTURES, EMBEDDING
from covmerge.plan.moe.prompts import HiddenStates, last_states, mean_embeddings, mean_states
from covmerge.plan.moe.updates import OfUpdates
from covmerge.plan.recipe.sections import Mixture

_NEARLY_DEPENDENT = 5.0  # condition number above which mergekit-moe warns too


@dataclass(frozen=True)
class Gates:
    """The routers of a mixture."""

    shape: tuple[int, int]  # of each: number of experts, size of the hidden states
    # Function that returns the router of a layer, float32; a last row is the gate of a shared
    # expert.
    of: Callable[[int], Tensor]
    notes: Sequence[str] = ()


def gates_of(
    moe: Mixture, sources: Mapping[str | None, Checkpoint], experts: Sequence[str], layers: int
) -> Gates:
    """Return the routers of all layers, from the dense base (None) and its experts if they are read."""
    base, routed, notes = sources[None], moe.routed(experts), list[str]()
    shape = len(routed), base.headers[EMBEDDING].shape[1]
    shared = [moe.shared.expert] if moe.shared is not None and moe.shared.gated else []
    prompts = [moe.prompts[name] for name in (*routed, *shared)] if moe.prompted else []
    of: Callable[[int], Tensor]
    if moe.gates == "update":
        of = OfUpdates(sources, routed, ARCHITECTURES[moe.architecture].norm)
    elif moe.late:
        of = HiddenStates(prompts, base, last_states if moe.gates == "hidden" else mean_states)
    else:  # known before any expert is read, `(layers, experts, hidden)`
        if moe.prompted:
            gates = mean_embeddings(prompts, base).expand((layers, -1, -1))
        else:
            gates = _drawn(moe, (layers, len(experts), shape[1]))
        of, notes = gates.__getitem__, warnings_of(gates[:, : len(routed)], _OTHER_PROMPTS)
    if moe.prompts and not moe.prompted:
        notes.append(
            f"`gates: {moe.gates}` reads no prompts: those of the recipe have no part in it"
        )
    return Gates(shape, of, notes)


def _drawn(moe: Mixture, shape: tuple[int, int, int]) -> Tensor:
    """Return random routers; numbers are drawn for a shared expert too, as in mergekit-moe."""
    generator = torch.Generator().manual_seed(moe.seed)
    if moe.gates == "random":
        return torch.randn(shape, generator=generator)
    bound = shape[-1] ** -0.5
    return torch.rand(shape, generator=generator) * 2 * bound - bound


_OTHER_PROMPTS = "write prompts that differ more, or add what the experts share as negative prompts"
_OTHER_EXPERTS = "leave one of two that learned alike out, or use `gates: cheap_embed` with prompts"


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
