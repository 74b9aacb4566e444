"""What carries work out: batches in, what was done out, in any order."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.hashing import Contents, Hashing
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.layer import Context
from covmerge.run.engine.outputs import Output
from covmerge.run.engine.reading import FileCheck
from covmerge.run.engine.selection import Selections

# The items of one range of rows, one for each plan: their operands are read once.
Batch = tuple[WorkItem, ...]


@dataclass(frozen=True)
class Span:
    """What one thread did for one item, in seconds of `time.perf_counter`."""

    stage: str
    thread: int
    start: float
    stop: float


@dataclass(frozen=True)
class Done:
    """An item whose result is where it belongs.

    Attributes:
        index: of its batch.
        number: its place in the batch.
        checksum: of what was written.
        stats: what there is to say of it.
        spans: when it was read, computed and written; reading counts for the first of a batch.
    """

    index: int
    number: int
    checksum: str
    stats: Mapping[str, Json]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Task:
    """What an executor needs beside the batches.

    Attributes:
        sources: the checkpoints.
        context: what the work needs to know.
        outputs: where the results go, by place in the batch; empty for counting.
        selections: what counting adds to.
    """

    sources: Sources
    context: Context
    outputs: Sequence[Output] = ()
    selections: Selections | None = None


class Executor(Protocol):
    """Carries work out."""

    def run(self, batches: Iterable[tuple[int, Batch]], task: Task) -> Generator[Done]:
        """Do all batches, and yield each item when its result has been written.

        Args:
            batches: numbered; they are taken one by one, from another thread too.
            task: what they need.

        Raises:
            CovmergeError: as the stages raise; the first error ends the work.
        """
        ...

    def hashing(self, contents: Contents) -> Hashing:
        """Return what hashes the sources beside the work, wherever that is done best.

        Args:
            contents: of all sources.
        """
        ...

    def read_files(
        self, sizes: Mapping[str, int], file_check: FileCheck, base: Checkpoint
    ) -> Mapping[str, Json]:
        """Read the files of the finished output once more, wherever that is done best.

        Args:
            sizes: bytes of each, by name.
            file_check: what is done with each.
            base: of the merge.

        Returns:
            What was found, by name.

        Raises:
            CovmergeError: as `file_check` raises.
        """
        ...

    def close(self) -> None:
        """Let go of what lives on between two runs."""
        ...


def held_together(items: Sequence[WorkItem]) -> int:
    """Bytes of what several plans read that are held until they have computed the same rows."""
    return max(item.held_bytes for item in items) + sum(item.statistics_bytes for item in items)


def read_together(items: Sequence[WorkItem]) -> int:
    """Bytes that several plans read for the same rows: the checkpoints once, statistics for each."""
    return max(item.read_bytes for item in items) + sum(item.statistics_bytes for item in items)


def moved_together(items: Sequence[WorkItem]) -> int:
    """Bytes read and written for the same rows by several plans."""
    return read_together(items) + sum(item.write_bytes for item in items)
