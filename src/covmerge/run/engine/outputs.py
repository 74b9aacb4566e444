"""The outputs of a run: tensors in memory, or files at planned places; and the room on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from covmerge.base.errors import ResourceError
from covmerge.base.sizes import format_size
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.writer import ShardWriter
from covmerge.plan.planning.forms import Place
from covmerge.plan.planning.types import Plan


class Output(Protocol):
    """A destination of results, which arrive in any order."""

    def write(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> str:
        """Store each tensor at its place, and return a checksum of all tensors."""
        ...

    def read_back(self, places: Sequence[Place]) -> str:
        """Return the checksum of the bytes that are stored at the places."""
        ...


class MemoryOutput:
    """An output in memory: tensors by part and name."""

    def __init__(self, parts: Mapping[str, Sequence[TensorHeader]]) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {
            part: {header.name: torch.empty(header.shape, dtype=header.dtype) for header in headers}
            for part, headers in parts.items()
        }

    def write(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> str:
        """Copy the rows to their places; return no checksum, as memory is never read back."""
        for place, tensor in zip(places, tensors, strict=True):
            target, rows = self.tensors[place.part][place.tensor], place.rows
            if target.is_complex():
                target = torch.view_as_real(target)
            block = target if rows is None or not target.dim() else target[rows.start : rows.stop]
            block.copy_(tensor)
        return ""

    def read_back(self, places: Sequence[Place]) -> str:
        """Return no checksum: memory does not survive the process."""
        return ""


class FileOutput:
    """An output in files: rows at their places in the files of each part."""

    def __init__(self, writers: Mapping[str, ShardWriter]) -> None:
        self._writers = writers

    def write(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> str:
        return " ".join(
            self._writers[place.part].write(place.tensor, tensor.contiguous(), place.rows)
            for place, tensor in zip(places, tensors, strict=True)
        )

    def read_back(self, places: Sequence[Place]) -> str:
        return " ".join(self._writers[p.part].read_back(p.tensor, p.rows) for p in places)

    def flush(self) -> None:
        """Wait until all written bytes are on the disk."""
        for writer in self._writers.values():
            writer.flush()


class NoOutput:
    """An output that drops the rows, for comparisons that write no models."""

    def write(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> str:
        return ""

    def read_back(self, places: Sequence[Place]) -> str:
        return ""


def in_memory(outputs: Sequence[Output]) -> bool:
    """Return whether an output is in memory: the copy of it in another process writes elsewhere."""
    return any(isinstance(output, MemoryOutput) for output in outputs)


@dataclass(frozen=True)
class Room:
    """The disk space that an output needs, and the space that is free in its folder, in bytes."""

    needed: int
    free: int
    folder: Path

    def check(self) -> None:
        """Raise ResourceError if the output does not fit."""
        if self.needed > self.free:
            raise ResourceError(
                f"no room for the output: {format_size(self.needed)} needed, "
                f"{format_size(self.free)} free at {self.folder}; free some space or choose "
                "another output folder"
            )


def room_for(plans: Sequence[Plan], out: Path) -> Room:
    """Return the space that the plans' outputs need, and the free space where `out` is or would be made."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    needed = sum(plan.write_bytes for plan in plans)
    return Room(needed, shutil.disk_usage(existing).free, existing)
