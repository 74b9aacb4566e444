"""What carries work out: batches in, what was done out, in any order."""

from __future__ import annotations

import heapq
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from covmerge.base import errors
from covmerge.base.errors import CovmergeError
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.hashing import Contents, FileCheck, Hashing, InStep, read_files
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.layer import Context
from covmerge.run.engine.outputs import Output
from covmerge.run.engine.selection import Selections

# The items of one range of rows, one for each plan: their operands are read once.
Batch = tuple[WorkItem, ...]
# What opens the sources of a run in another process.
Opener = Callable[[], AbstractContextManager[Sources]]


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
    """Carries work out. By default this process hashes the sources and reads the finished output."""

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
        """Return what hashes the sources beside the work, wherever that is done best."""
        return InStep(contents)

    def read_files(
        self, sizes: Mapping[str, int], file_check: FileCheck, base: Checkpoint
    ) -> Mapping[str, Json]:
        """Read the files of the finished output once more, wherever that is done best.

        Raises:
            CovmergeError: as `file_check` raises.
        """
        return read_files(sizes, file_check, base)

    def close(self) -> None:
        """Let go of what lives on between two runs."""


def held_together(items: Sequence[WorkItem]) -> int:
    """Bytes of what several plans read that are held until they have computed the same rows."""
    return max(item.held_bytes for item in items) + sum(item.statistics_bytes for item in items)


def read_together(items: Sequence[WorkItem]) -> int:
    """Bytes that several plans read for the same rows: the checkpoints once, statistics for each."""
    return max(item.read_bytes for item in items) + sum(item.statistics_bytes for item in items)


def moved_together(items: Sequence[WorkItem]) -> int:
    """Bytes read and written for the same rows by several plans."""
    return read_together(items) + sum(item.write_bytes for item in items)


# Errors that go from one process to another.


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can raise; of one that does not pickle, its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return error_named(*named_error(error))
    return error


def named_error(error: BaseException) -> tuple[str, str]:
    """Return the name of the nearest of our errors that is made of a message alone, and the message.

    Example:
        >>> from covmerge.base.errors import NotFiniteError
        >>> named_error(NotFiniteError("w", None, "has NaN"))
        ('TensorError', "'w' of the base has NaN")
    """
    for kind in type(error).__mro__:
        if issubclass(kind, CovmergeError) and kind.__module__ == CovmergeError.__module__:
            with suppress(TypeError):
                kind("")
                return kind.__name__, str(error)
    return "RuntimeError", f"{type(error).__name__}: {error}"


def error_named(kind: str, message: str) -> Exception:
    """Return the error whose name and message another process gave."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, CovmergeError):
        with suppress(TypeError):
            return found(message)
    return RuntimeError(message)


# The order of work: the largest first, and equal shares; nobody waits for a large item at the end.

T = TypeVar("T")


def largest_first(
    items: Iterable[T], size: Callable[[T], int], within: int | None = None
) -> Iterator[T]:
    """Yield the largest first, and of equal ones the one that came first.

    Args:
        items: read no further ahead than `within`.
        size: of an item.
        within: how far ahead items are read: the size of all that is passed over; None: to the end.

    Example:
        >>> list(largest_first([1, 5, 2, 4], lambda size: size))
        [5, 4, 2, 1]
        >>> list(largest_first([1, 2, 5, 4], lambda size: size, within=2))
        [2, 5, 4, 1]
    """
    held: list[tuple[int, int, T]] = []
    ahead = 0
    for number, item in enumerate(items):
        heapq.heappush(held, (-size(item), number, item))
        ahead += size(item)
        while within is not None and ahead > within:
            negative, _, largest = heapq.heappop(held)
            ahead += negative
            yield largest
    while held:
        yield heapq.heappop(held)[2]


def shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide items among some, the largest first and each to the one that has least so far.

    Example:
        >>> shares([1, 5, 2, 4], 2)
        [[1, 0], [3, 2]]
    """
    divided: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for place in largest_first(range(len(sizes)), lambda place: sizes[place]):
        load, number = heapq.heappop(loads)
        divided[number].append(place)
        heapq.heappush(loads, (load + sizes[place], number))
    return divided


def own_first(sizes: Sequence[int], number: int, count: int) -> list[int]:
    """Return the places of all items: one's own share, then what the others would come to last.

    Example:
        >>> own_first([1, 5, 2, 4], 1, 2)
        [3, 2, 0, 1]
    """
    divided = shares(sizes, count)
    others = [divided[(number + step) % count] for step in range(1, count)]
    return divided[number] + [place for share in others for place in reversed(share)]
