"""Where results go: tensors in memory, or files at planned places with room on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from covmerge.base.errors import ResourceError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.writer import ShardWriter
from covmerge.plan.planning.forms import Place
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import format_size


class Output(Protocol):
    """Takes the results of items, in any order."""

    @property
    def in_files(self) -> bool:
        """Whether another process that is sent this writes to the same place."""
        ...

    def write(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> str:
        """Keep tensors, each at its place, and return a checksum of all of them."""
        ...

    def read_back(self, places: Sequence[Place]) -> str:
        """Return the checksum of what is there."""
        ...


class MemoryOutput:
    """Tensors by part and name."""

    in_files = False

    def __init__(self, parts: Mapping[str, Sequence[TensorHeader]]) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {
            part: {header.name: torch.empty(header.shape, dtype=header.dtype) for header in headers}
            for part, headers in parts.items()
        }

    def write(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> str:
        """Copy the rows in place; nobody asks for a checksum."""
        for place, tensor in zip(places, tensors, strict=True):
            target, rows = self.tensors[place.part][place.tensor], place.rows
            if target.is_complex():
                target = torch.view_as_real(target)
            block = target if rows is None or not target.dim() else target[rows.start : rows.stop]
            block.copy_(tensor)
        return ""

    def read_back(self, places: Sequence[Place]) -> str:
        """Nothing survives a process."""
        del places
        return ""


class FileOutput:
    """Rows at their places in the files of each part."""

    def __init__(self, writers: Mapping[str, ShardWriter]) -> None:
        self._writers = writers

    @property
    def in_files(self) -> bool:
        return all(writer.in_files for writer in self._writers.values())

    def write(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> str:
        return " ".join(
            self._writers[place.part].write(place.tensor, tensor.contiguous(), place.rows)
            for place, tensor in zip(places, tensors, strict=True)
        )

    def read_back(self, places: Sequence[Place]) -> str:
        return " ".join(self._writers[p.part].read_back(p.tensor, p.rows) for p in places)

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        for writer in self._writers.values():
            writer.flush()


class NoOutput:
    """Forgets the rows: for comparisons that want no models."""

    in_files = True

    def write(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> str:
        """Let them go."""
        del places, tensors
        return ""

    def read_back(self, places: Sequence[Place]) -> str:
        """Nothing is kept."""
        del places
        return ""


@dataclass(frozen=True)
class Room:
    """Disk space that an output needs, and where it would lie."""

    needed: int
    free: int
    folder: Path

    def check(self) -> None:
        """Refuse an output that does not fit."""
        if self.needed > self.free:
            raise ResourceError(
                f"no room for the output: {format_size(self.needed)} needed, "
                f"{format_size(self.free)} free at {self.folder}; free some space or choose "
                "another output folder"
            )


def room_for(plans: Sequence[Plan], out: Path) -> Room:
    """Return what the plans' outputs need, and what is free where `out` would be made."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    needed = sum(plan.write_bytes for plan in plans)
    return Room(needed, shutil.disk_usage(existing).free, existing)
