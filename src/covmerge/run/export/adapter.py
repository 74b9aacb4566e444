"""adapter_config.json of a merged adapter, as PEFT reads it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from covmerge.base.settings import Hint
from covmerge.base.types import Json
from covmerge.files.adapters.checkpoint import ADAPTER_CONFIG, AdapterCheckpoint
from covmerge.files.adapters.layout import AdaptedTensor, WholeTensor
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.json_file import dumps
from covmerge.files.stores.store import WritableFile, WritableStore
from covmerge.plan.planning.adapter import left_out
from covmerge.plan.planning.types import Plan

_WITHOUT_HEAD = ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION")


def write_adapter_config(
    store: WritableStore,
    tensors: Sequence[AdaptedTensor],
    whole: Sequence[WholeTensor],
    parameters: Sequence[str],
    parents: Sequence[Mapping[str, Any]],
    base: Checkpoint,
) -> str:
    """Write the configuration: what all parents agree on; without parents, of the base; return its name.

    Args:
        store: where the adapter lies.
        tensors: what the adapter updates.
        whole: what it replaces.
        parameters: names of all tensors of the model.
        parents: configurations of the adapters that were merged.
        base: what the adapter is loaded over.

    Raises:
        ResourceError: the disk is full.
    """
    ranks = {tensor.module: tensor.rank for tensor in tensors}
    largest = max(ranks.values())  # which servers hold against their limit
    # The scale alpha / r is 1 in every layer: it is in the factors.
    wrapped = _parameters(ranks, parents)
    special: dict[str, Json] = {
        _pattern(module): rank for module, rank in ranks.items() if rank != largest
    }
    name, revision = _named(base) if not parents else (None, None)
    config: dict[str, Json] = {
        "peft_type": "LORA",
        "base_model_name_or_path": _agreed(parents, "base_model_name_or_path") or name,
        "revision": _agreed(parents, "revision") or revision,
        "task_type": _task_type(parents, base),
        "inference_mode": True,
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": special,
        "alpha_pattern": special,
        "target_modules": _targets(sorted(ranks.keys() - wrapped), parameters),
        **(
            {"target_parameters": [f"{module}.weight" for module in sorted(wrapped)]}
            if wrapped
            else {}
        ),
        "fan_in_fan_out": any(t.transposed and not t.embedding for t in tensors),
        "bias": "none" if all(len(t.modules) == len(t.names) for t in whole) else "all",
        "modules_to_save": sorted({module for t in whole for module in t.modules}) or None,
        "lora_dropout": 0.0,
    }
    content = dumps(config, what="adapter_config", indent=2).encode() + b"\n"
    WritableFile(store, ADAPTER_CONFIG).put(content)
    return ADAPTER_CONFIG


def bases_that_differ(adapters: Sequence[AdapterCheckpoint]) -> Iterator[str]:
    """Say that adapters name different bases, so that the merged one names none."""
    named = sorted({adapter.base_model or "none" for adapter in adapters})
    if len(named) > 1:
        yield (
            f"the adapters name different bases ({', '.join(named)}), so the merged one names none: "
            "load it over a base of your choice"
        )


def changed_and_left_out(plan: Plan, changed: Collection[str]) -> Iterator[str]:
    """Say which tensors an adapter does not have, of those whose merged update is not zero."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in plan.tensors:
        if tensor.name in changed and not tensor.form.places(tensor.output, None):
            why = (
                "PEFT would add factors of tied weights twice, so they are only held whole "
                f"({Hint('whole')})"
                if tensor.ties
                else f"they are no layers with factors ({Hint('whole')} holds them where PEFT can)"
            )
            reasons[why].append(tensor.name)
    for why, names in reasons.items():
        yield left_out(names, why)


def _parameters(modules: Collection[str], parents: Sequence[Mapping[str, Any]]) -> set[str]:
    """The modules that a parent names by their weight, as PEFT must of those that are no layers to it."""
    named = [name for parent in parents for name in parent.get("target_parameters") or ()]
    return {
        module
        for module in modules
        if any(f".{module}.weight".endswith(f".{name}") for name in named)
    }


def _targets(modules: Sequence[str], parameters: Sequence[str]) -> Json:
    """The layers by name, or as one expression where a name is the end of another's."""
    others = {name.rpartition(".")[0] for name in parameters} - set(modules)
    if any(other.endswith(f".{module}") for other in others for module in modules):
        return "|".join(map(re.escape, modules))
    return list(modules)


def _pattern(module: str) -> str:
    """A key that matches this module alone; PEFT asks for a router by the name of its weight."""
    return rf"^{re.escape(module)}(\.weight)?"


def _named(base: Checkpoint) -> tuple[str | None, str | None]:
    """Return name and revision by which a base can be loaded, if it can."""
    if base.hub is not None:
        return base.hub.name, base.hub.commit
    return (None if base.identity()["kind"] == "memory" else base.source), None


def _task_type(parents: Sequence[Mapping[str, Any]], base: Checkpoint) -> Json:
    """What PEFT calls a language model; to a classifier it would add a head, which is not there."""
    if parents:
        task = _agreed(parents, "task_type")
        return task if task in _WITHOUT_HEAD else None
    architectures = (base.config or {}).get("architectures") or [""]
    return "CAUSAL_LM" if str(architectures[0]).endswith("ForCausalLM") else None


def _agreed(parents: Sequence[Mapping[str, Any]], key: str) -> Json:
    values = [parent.get(key) for parent in parents]
    return values[0] if values and all(value == values[0] for value in values) else None
