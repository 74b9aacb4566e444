"""A state dict in memory, as a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import isclose, sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted
from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.adapter_reader import adapter_reader
from covmerge.files.checkpoints.base import (
    Checkpoint,
    Content,
    Kind,
    Pace,
    copy_rows,
    find_header,
    fingerprint,
    header_of,
)
from covmerge.files.stores.hub_cache import HubModel


class MemoryCheckpoint(Kind):
    """The tensors of a mapping, on whatever device they are.

    The tensors are not copied before they are read: do not change them meanwhile.

    Args:
        tensors: by name.
        config: of the model.
        settings: what else decides what the tensors mean, such as an adapter's configuration.
    """

    folder: Path | None = None
    hub: HubModel | None = None
    is_held = True
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.source = f"<{counted(len(tensors), 'tensor')} in memory>"
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: header_of(name, tensor, self.source) for name, tensor in tensors.items()}
        )
        self._tensors = dict(tensors)
        self.shared: Mapping[str, str] = _shared(self._tensors)
        self._said = "" if settings is None else json.dumps(settings, sort_keys=True)

    def readme(self) -> Path | None:
        """There is none."""

    def companions(self) -> Path | None:
        """There are none."""

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, self.source)
        if name not in self._tensors:
            raise CheckpointError(f"{self.source} are closed: open them again")
        return copy_rows(self._tensors[name], rows)

    def materialize(self) -> None:
        """Everything is here."""

    def identity(self) -> dict[str, Json]:
        """The content: names and times say nothing about memory."""
        return {"kind": "memory", **fingerprint(self)}

    def contents(self) -> Sequence[Content]:
        """All tensors as one: names, dtypes, shapes and values."""
        size = sum(header.nbytes for header in self.headers.values())
        return [Content("tensors", size, self._hash)]

    def _hash(self, pace: Pace) -> str:
        digest, done = hashlib.sha256(self._said.encode()), 0
        for name, header in self.headers.items():
            pace(done)
            digest.update(f"{name!r} {header.dtype} {header.shape}\n".encode())
            values = self.read(name).reshape(-1).view(torch.uint8)
            digest.update(values.numpy().data)
            done += header.nbytes
        return f"sha256:{digest.hexdigest()}"

    def close(self) -> None:
        """Let go of the tensors."""
        self._tensors = {}


def _shared(tensors: Mapping[str, Tensor]) -> Mapping[str, str]:
    """Tensors that are one with an earlier one: the same values of the same memory, as tied weights are.

    Example:
        >>> table = torch.ones(3, 2)
        >>> _shared({"embed.weight": table, "lm_head.weight": table, "copy": table.clone()})
        {'lm_head.weight': 'embed.weight'}
    """
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            lies = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            earlier = first.setdefault(lies, name)
            if earlier != name:
                found[name] = earlier
    return found


# get_peft_model changes the model that it is given.
PASS_FOLDED = (
    "pass the PeftModel, its folder or the pair (get_peft_model_state_dict(model), its peft_config) as the "
    "expert, and the base's folder as the base; or the model with the adapter folded in "
    "(model.merge_and_unload())"
)


def open_module(module: nn.Module) -> Checkpoint:
    """See the tensors of a module as a checkpoint; its config, if it is a model of transformers.

    A PeftModel, or a model of transformers with an adapter in it, is that adapter.

    Raises:
        CheckpointError: it holds an adapter beside its weights, or several.
    """
    if _is_of_peft(module):
        return adapter_reader().open_adapter_memory(*_adapter_of(module))
    tensors = module.state_dict()
    adapted = next((name for name in tensors if ".lora_A." in name), None)
    if adapted is not None:
        raise CheckpointError(
            f"the {type(module).__name__} holds an adapter beside its weights ('{adapted}'): {PASS_FOLDED}"
        )
    # As transformers writes config.json; the configs of other libraries are not read.
    write = getattr(getattr(module, "config", None), "to_json_string", None)
    return MemoryCheckpoint(tensors, None if write is None else json.loads(write()))


def _is_of_peft(module: nn.Module) -> bool:
    """Whether it is an adapter with its base, of PEFT's class or as transformers loads it."""
    kinds = [kind.__module__.partition(".")[0] for kind in type(module).__mro__]
    return "peft" in kinds or getattr(module, "_hf_peft_config_loaded", False) is True


def _check_scales(module: Any, name: str, config: Any) -> None:
    """Refuse a LoRA with another scale than its configuration says: what PEFT saves has the latter."""
    if getattr(config, "peft_type", None) != "LORA":
        return
    for path, layer in module.named_modules():
        held = [getattr(layer, field, None) for field in ("scaling", "lora_alpha", "r")]
        if not all(isinstance(one, dict) and name in one for one in held):
            continue
        scale, alpha, rank = (float(one[name]) for one in held)
        said = alpha / (sqrt(rank) if config.use_rslora else rank)
        if not isclose(scale, said, rel_tol=1e-6):
            raise CheckpointError(
                f"the {type(module).__name__} scales the adapter of '{path}' by {scale:g}, and its "
                f"configuration says {said:g}, as after hotswap_adapter or set_scale: pass the folder of "
                "the adapter, with a weight where it is to count for more or less"
            )


def _adapter_of(module: Any) -> tuple[Mapping[str, Tensor], object]:
    """Return the adapter of a module as PEFT would save it."""
    named: Mapping[str, object] = module.peft_config
    if len(named) > 1:
        raise CheckpointError(
            f"the {type(module).__name__} holds the adapters {', '.join(named)}: pass each as the pair "
            "(get_peft_model_state_dict(model, adapter_name=NAME), model.peft_config[NAME])"
        )
    ((name, config),) = named.items()
    _check_scales(module, name, config)
    peft: Any = import_module("peft")
    tensors: Mapping[str, Tensor] = peft.get_peft_model_state_dict(module, adapter_name=name)
    prefix = "base_model.model."  # which transformers adds as it saves
    if not any(key.startswith(prefix) for key in tensors):
        tensors = {prefix + key: tensor for key, tensor in tensors.items()}
    return tensors, config
