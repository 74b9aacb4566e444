"""A state dict in memory, seen as a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted
from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.base import Kind, copy_rows, find_header, fingerprint, header_of
from covmerge.files.checkpoints.content import Content, Pace
from covmerge.files.stores.hub_cache import HubModel


class MemoryCheckpoint(Kind):
    """The tensors of a mapping, on whatever device they are.

    The tensors are not copied before they are read: do not change them meanwhile.
    """

    folder: Path | None = None
    hub: HubModel | None = None
    notes: tuple[str, ...] = ()

    def __init__(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
    ) -> None:
        self.config = config
        self.source = f"<{counted(len(tensors), 'tensor')} in memory>"
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: header_of(name, tensor, self.source) for name, tensor in tensors.items()}
        )
        self._tensors = dict(tensors)

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
        digest, done = hashlib.sha256(), 0
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


PASS_FOLDED = (
    "pass the folder of the adapter, or the model with it folded in (model.merge_and_unload())"
)


def open_module(module: nn.Module) -> MemoryCheckpoint:
    """See the tensors of a module as a checkpoint; its config, if it is a model of transformers.

    Raises:
        CheckpointError: it holds an adapter beside its weights.
    """
    tensors = module.state_dict()
    adapted = next((name for name in tensors if ".lora_A." in name), None)
    if adapted is not None:
        raise CheckpointError(
            f"the {type(module).__name__} holds an adapter beside its weights ('{adapted}'): {PASS_FOLDED}"
        )
    # As transformers writes config.json; the configs of other libraries are not read.
    write = getattr(getattr(module, "config", None), "to_json_string", None)
    return MemoryCheckpoint(tensors, None if write is None else json.loads(write()))
