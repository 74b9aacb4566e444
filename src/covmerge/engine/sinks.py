"""Where merged rows go: a dict of tensors, or shards with a journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from covmerge.checkpoints import Entry, Journal, ShardWriter
from covmerge.plan import Plan, WorkItem
from covmerge.types import Json


class Sink(Protocol):
    """Takes finished items, in any order."""

    def finished(self, item: WorkItem) -> Mapping[str, Json] | None:
        """Return the statistics of an item that an earlier run finished, None if it is to be done."""
        ...

    def write(self, item: WorkItem, rows: Tensor, stats: Mapping[str, Json]) -> None:
        """Keep the merged rows of an item."""
        ...


class MemorySink:
    """Keeps the output as a dict of tensors."""

    def __init__(self, plan: Plan) -> None:
        self.tensors: dict[str, Tensor] = {
            header.name: torch.empty(header.shape, dtype=header.dtype)
            for header in plan.output_headers
        }

    def finished(self, item: WorkItem) -> Mapping[str, Json] | None:
        """Nothing survives a process."""
        del item
        return None

    def write(self, item: WorkItem, rows: Tensor, stats: Mapping[str, Json]) -> None:
        """Copy the rows in place."""
        del stats
        target = self.tensors[item.tensor.name]
        if item.rows is not None:
            target = target[item.rows.start : item.rows.stop]
        target.copy_(rows)


class DiskSink:
    """Writes rows at their offset in a shard, then a line with their checksum to the journal."""

    def __init__(self, writer: ShardWriter, journal: Journal) -> None:
        self._writer = writer
        self._journal = journal

    def finished(self, item: WorkItem) -> Mapping[str, Json] | None:
        """Statistics of a journaled item whose bytes in the shard still have their checksum."""
        entry = self._journal.finished.get(item.key)
        if entry is None or self._writer.read_back(item.tensor.name, item.rows) != entry.checksum:
            return None
        return entry.stats

    def write(self, item: WorkItem, rows: Tensor, stats: Mapping[str, Json]) -> None:
        """Write first, journal second: a line in the journal stands for bytes that are there."""
        checksum = self._writer.write(item.tensor.name, rows.contiguous(), item.rows)
        self._journal.append(Entry(*item.key, checksum, stats))
