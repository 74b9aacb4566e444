"""A state dict in memory as a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted
from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.base import (
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
    """The tensors of a mapping, on any device.

    The tensors are copied only when they are read. Do not change them before. `settings` are others that
    the meaning of the tensors depends on, such as an adapter's config. `under`: see `Kind`.
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
        under: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.config = config
        self.source = f"<{counted(len(tensors), 'tensor')} in memory>"
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: header_of(name, tensor, self.source) for name, tensor in tensors.items()}
        )
        self.under = under or {}
        self._tensors = dict(tensors)
        self.shared: Mapping[str, str] = _shared(self._tensors)
        self._said = "" if settings is None else json.dumps(settings, sort_keys=True)

    def companions(self) -> Path | None:
        """Return None: a state dict has no companion files."""

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, self.source)
        if name not in self._tensors:
            raise CheckpointError(f"{self.source} are closed: open them again")
        return copy_rows(self._tensors[name], rows)

    def identity(self) -> dict[str, Json]:
        """Return a hash of the content, because names and times say nothing about memory."""
        return {"kind": "memory", **fingerprint(self)}

    def contents(self) -> Sequence[Content]:
        """Return one piece with all tensors: names, dtypes, shapes and values."""
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
        """Release the tensors."""
        self._tensors = {}


def _shared(tensors: Mapping[str, Tensor]) -> Mapping[str, str]:
    """Return names of tensors that are views of the same memory as an earlier tensor, like tied weights.

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
