"""Where merged rows go: a dict of tensors, or shards with a journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from covmerge.checkpoints import Entry, Journal, MaskWriter, ShardWriter
from covmerge.engine.worker import Result
from covmerge.plan import Plan, WorkItem
from covmerge.types import Json


class Sink(Protocol):
    """Takes finished items, in any order."""

    def finished(self, item: WorkItem) -> Mapping[str, Json] | None:
        """Return the statistics of an item that an earlier run finished, None if it is to be done."""
        ...

    def write(self, item: WorkItem, result: Result) -> None:
        """Keep the merged rows of an item."""
        ...


class MemorySink:
    """Keeps the output as a dict of tensors."""

    def __init__(self, plan: Plan) -> None:
        self.tensors: dict[str, Tensor] = {
            header.name: torch.empty(header.shape, dtype=header.dtype)
            for header in plan.output_headers
        }
        self.masks: dict[str, dict[str, Tensor]] = {}

    def finished(self, item: WorkItem) -> Mapping[str, Json] | None:
        """Nothing survives a process."""
        del item
        return None

    def write(self, item: WorkItem, result: Result) -> None:
        """Copy the rows in place."""
        name = item.tensor.name
        rows = slice(None) if item.rows is None else slice(item.rows.start, item.rows.stop)
        _at(self.tensors[name], rows).copy_(result.rows)
        for expert, mask in result.masks.items():
            kept = self.masks.setdefault(expert, {})
            if name not in kept:
                kept[name] = torch.zeros(item.tensor.output.shape, dtype=torch.bool)
            _at(kept[name], rows).copy_(mask)


def _at(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows] if tensor.dim() else tensor


class DiskSink:
    """Writes rows at their offset in a shard, then a line with their checksum to the journal.

    Without a journal the work cannot be resumed.
    """

    def __init__(
        self, writer: ShardWriter, journal: Journal | None, masks: MaskWriter | None = None
    ) -> None:
        self._writer = writer
        self._journal = journal
        self._masks = masks

    def finished(self, item: WorkItem) -> Mapping[str, Json] | None:
        """Statistics of a journaled item whose bytes on the disk still have their checksum."""
        entry = self._journal and self._journal.finished.get(item.key)
        if entry is None:
            return None
        checksum = self._writer.read_back(item.tensor.name, item.rows)
        if self._masks is not None and item.tensor.writes_masks:
            checksum += " " + self._masks.read_back(
                item.tensor.name, item.rows, list(item.tensor.sources)
            )
        return entry.stats if entry.checksum == checksum else None

    def write(self, item: WorkItem, result: Result) -> None:
        """Write first, journal second: a line in the journal stands for bytes that are there."""
        checksum = self._writer.write(item.tensor.name, result.rows.contiguous(), item.rows)
        if self._masks is not None and result.masks:
            checksum += " " + self._masks.write(item.tensor.name, item.rows, result.masks)
        if self._journal is not None:
            self._journal.append(Entry(*item.key, checksum, result.stats))


class NoSink:
    """Forgets the rows: for comparisons that want no models."""

    def finished(self, item: WorkItem) -> Mapping[str, Json] | None:
        """Nothing is kept."""
        del item
        return None

    def write(self, item: WorkItem, result: Result) -> None:
        """Let the rows go."""
