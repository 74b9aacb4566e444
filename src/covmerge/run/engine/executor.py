"""The interface of executors: they take batches and yield finished items, in any order."""

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
from covmerge.run.engine.hashing import Contents, Hashing, InStep, WeightsCheck, read_files
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.layer import Context
from covmerge.run.engine.outputs import Output
from covmerge.run.engine.selection import Selections

# The items of one range of rows, one item for each plan; their operands are read once.
Batch = tuple[WorkItem, ...]
# A function that opens the sources of a run in another process.
Opener = Callable[[], AbstractContextManager[Sources]]


@dataclass(frozen=True)
class Span:
    """The time that one thread spent on one stage of an item, in seconds of `time.perf_counter`."""

    stage: str
    thread: int
    start: float
    stop: float


@dataclass(frozen=True)
class Done:
    """A finished item, whose result has been written."""

    index: int  # of the item's batch
    number: int  # place of the item in its batch
    checksum: str  # of the bytes written
    stats: Mapping[str, Json]  # measurements of the item
    spans: tuple[Span, ...]  # of its stages; only the first item of a batch has the reading


@dataclass(frozen=True)
class Task:
    """The arguments of an executor beside the batches."""

    sources: Sources
    context: Context
    outputs: Sequence[Output] = ()  # by place in the batch; empty for counting
    selections: Selections | None = None  # the counters that counting adds to; None for a merge


class Executor(Protocol):
    """Does batches of work. By default this process hashes the sources and reads the finished output."""

    def run(self, batches: Iterable[tuple[int, Batch]], task: Task) -> Generator[Done]:
        """Do all batches, and yield each item when its result has been written.

        The executor takes the numbered batches one by one, possibly in another thread.

        Raises:
            CovmergeError: the first error of any stage; it ends the work.
        """
        ...

    def hashing(self, contents: Contents) -> Hashing:
        """Return an object that hashes the sources during the work, in the processes that suit best."""
        return InStep(contents)

    def read_files(
        self, sizes: Mapping[str, int], file_check: WeightsCheck, base: Checkpoint
    ) -> Mapping[str, Json]:
        """Read the files of the finished output once more, in the processes that suit best."""
        return read_files(sizes, file_check, base)

    def close(self) -> None:
        """Release the resources that are kept between two runs."""


def held_together(items: Sequence[WorkItem]) -> int:
    """Return the bytes read for a batch that are held until every plan has computed its rows."""
    return max(item.held_bytes for item in items) + sum(item.statistics_bytes for item in items)


def read_together(items: Sequence[WorkItem]) -> int:
    """Return the bytes that a batch reads: the checkpoints once, the statistics for each plan."""
    return max(item.read_bytes for item in items) + sum(item.statistics_bytes for item in items)


def moved_together(items: Sequence[WorkItem]) -> int:
    """Return the bytes that a batch reads and writes."""
    return read_together(items) + sum(item.write_bytes for item in items)


# Errors that are sent from one process to another.


def portable(error: BaseException) -> BaseException:
    """Return an error that can be pickled: the same error, or else one of the same message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return error_named(*named_error(error))
    return error


def named_error(error: BaseException) -> tuple[str, str]:
    """Return the error's message and the nearest class of covmerge that a message alone can make.

    The search goes up from the error's own class; RuntimeError where no class of covmerge fits.

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
    """Return the error of a class name and a message that another process sent."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, CovmergeError):
        with suppress(TypeError):
            return found(message)
    return RuntimeError(message)


# The order of work: the largest items first, and equal shares, so that no process waits for a large item
# at the end.

T = TypeVar("T")


def largest_first(
    items: Iterable[T], size: Callable[[T], int], within: int | None = None
) -> Iterator[T]:
    """Yield items, the largest first; items of equal size keep their order.

    Items of a total size of `within` are held back while larger ones go first; None: any size.

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
    """Divide items into `count` shares: the largest first, each to the share that is smallest so far.

    Return the places of the items of each share.

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
    """Return the places of all items: the share of process `number`, then the other shares from their ends.

    Example:
        >>> own_first([1, 5, 2, 4], 1, 2)
        [3, 2, 0, 1]
    """
    divided = shares(sizes, count)
    others = [divided[(number + step) % count] for step in range(1, count)]
    return divided[number] + [place for share in others for place in reversed(share)]
