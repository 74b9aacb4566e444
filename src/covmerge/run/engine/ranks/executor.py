"""The executor of ranks: each does its share by an executor of its own, and what others leave."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import CheckpointError
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.journal import Entry
from covmerge.files.stores.regular_file import read_regular
from covmerge.run.engine.executor import Batch, Done, Executor, Task, moved_together
from covmerge.run.engine.hashing import Contents, Hashing, WeightsCheck
from covmerge.run.engine.ranks.claims import Holding, settle, who_has
from covmerge.run.engine.ranks.reading import SharedHashing, lead_reading
from covmerge.run.engine.ranks.session import Session
from covmerge.run.engine.selection import Selections
from covmerge.run.engine.worker import check_there

_MOST_BYTES = 2**34  # of what a rank has counted


class Ranks:
    """An executor. What it yields is the work of all ranks.

    Every rank claims items, its own share first, and then what others have not come to; what a rank
    had that is gone is claimed once more. An item of a merge may be done twice, with the same bytes. Of
    a pass that counts, each rank hands over what it has counted in one file, or is told by an empty
    one that it was taken for gone: every row is counted once.
    """

    def __init__(self, inner: Executor, session: Session) -> None:
        self._inner = inner
        self._session = session
        self._stages = 0
        self.done_here = 0  # batches that this rank did

    def run(self, batches: Iterable[tuple[int, Batch]], task: Task) -> Generator[Done]:
        """See `Executor.run`.

        Raises:
            LeaderGoneError: the rank that leads is gone, and with it the journal.
            CheckpointError: what another rank wrote is not there.
        """
        session, given = self._session, dict(batches)
        number, self._stages = self._stages, self._stages + 1
        if session.leads:
            session.open_stage(number, list(given))
        stage = _Stage(number, {index: given[index] for index in session.stage(number)}, task)
        doing = self._count if task.selections is not None else self._merge
        try:
            yield from doing(stage)
        except Exception as error:
            session.failed(number, error)
            raise

    def hashing(self, contents: Contents) -> Hashing:
        return SharedHashing(self._session, contents)

    def read_files(
        self, sizes: Mapping[str, int], file_check: WeightsCheck, base: Checkpoint
    ) -> Mapping[str, Json]:
        return lead_reading(self._session, sizes, file_check, base)

    def close(self) -> None:
        self._inner.close()

    def _merge(self, stage: _Stage) -> Iterator[Done]:
        holding = self._holding(stage)
        todo = self._claimed(stage, holding)
        while True:
            # Closed by hand: an error here must not leave threads at work.
            with closing(self._inner.run(todo, stage.task)) as finished:
                for done in finished:
                    key = stage.batches[done.index][done.number].key
                    entry = Entry(*key, done.checksum, done.stats)
                    place = {"stage": stage.number, "index": done.index, "number": done.number}
                    self._session.tell({**place, **entry.as_json()})
                    yield from stage.take(done)
                    self._session.ledgers.refresh_if_due()
                    yield from self._heard(stage)
            yield from self._heard(stage)
            if stage.is_complete:
                return
            todo = self._abandoned(stage, holding)
            self._session.wait()

    def _count(self, stage: _Stage) -> Iterator[Done]:
        selections = stage.task.selections
        assert selections is not None
        holding = self._holding(stage)
        todo = self._claimed(stage, holding)
        while True:
            counters, counted = selections.emptied(), list[int]()
            task = replace(stage.task, selections=counters)
            with closing(self._inner.run(todo, task)) as finished:
                for done in finished:
                    counted += [done.index] if done.number == 0 else []
                    yield done
            if counted:
                settle(self._counts(holding.name), _packed(counted, counters))
                holding = self._holding(stage)
            list(self._heard(stage))  # errors of others
            if self._handed_over(stage, selections):
                return
            todo = self._abandoned(stage, holding)
            self._session.wait()

    def _claimed(self, stage: _Stage, holding: Holding) -> Iterator[tuple[int, Batch]]:
        """Claim items that nobody has; the executor comes back when it can take one more."""
        sizes = {index: moved_together(batch) for index, batch in stage.batches.items()}
        return self._taken(stage, holding.unclaimed(sizes, self._session.rank, stage.done))

    def _abandoned(self, stage: _Stage, holding: Holding) -> Iterator[tuple[int, Batch]]:
        """Claim items whose rank is gone before it had done them."""
        will_do_it = partial(self._will_do_it, stage)
        return self._taken(stage, holding.left(stage.batches, stage.done, will_do_it))

    def _taken(self, stage: _Stage, indexes: Iterable[int]) -> Iterator[tuple[int, Batch]]:
        for index in indexes:
            self.done_here += 1
            yield index, stage.batches[index]

    def _will_do_it(self, stage: _Stage, holding: str) -> bool:
        """Whether who has an item is there, or has handed it over."""
        counting = stage.task.selections is not None
        if who_has(holding) == self._session.who:
            return not (counting and self._is_void(holding))
        if not self._session.ledgers.is_gone(who_has(holding)):
            return True
        return counting and not (settle(self._counts(holding), b"") or self._is_void(holding))

    def _heard(self, stage: _Stage) -> Iterator[Done]:
        """What other ranks say they have done."""
        for who, record in self._session.heard(stage.number):
            try:
                index, number = int(record["index"]), int(record["number"])
                entry, item = Entry.from_json(record), stage.batches[index][number]
                if entry.key != item.key:
                    raise ValueError("it is another item")
            except (LookupError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the ledger of rank {who} in {self._session.folder} says what no rank does ({error})"
                ) from error
            done = Done(index, number, entry.checksum, entry.stats, ())
            if self._session.leads and (index, number) not in stage.handed_on:
                wait = self._session.wait
                check_there(done, stage.batches[index], stage.task, f"rank {who}", wait)
            yield from stage.take(done)

    def _handed_over(self, stage: _Stage, selections: Selections) -> bool:
        """Add up what all have counted, if that is everything."""
        for path in sorted(self._session.folder.glob(f"{stage.number}-*.counted")):
            if path not in stage.parts:
                stage.parts[path], _ = _whole(path)
        times = Counter(index for indexes in stage.parts.values() for index in indexes)
        stage.done.update(times)
        if not stage.is_complete:
            return False
        assert set(times.values()) <= {1}, "a row was counted twice"
        for path, indexes in stage.parts.items():
            if indexes:
                selections.absorb_counted(_whole(path)[1])
        return True

    def _is_void(self, holding: str) -> bool:
        """Whether what was counted under a name is not taken any more."""
        path = self._counts(holding)
        return path.exists() and path.stat().st_size == 0

    def _counts(self, holding: str) -> Path:
        return self._session.folder / f"{holding}.counted"

    def _holding(self, stage: _Stage) -> Holding:
        stage.holdings += 1
        return self._session.holding(stage.number, stage.holdings)


@dataclass
class _Stage:
    """One run over batches, as a rank sees it.

    Attributes:
        handed_on: what has been handed on, as index and place in the batch.
        done: the batches of which all has been.
        holdings: how many this rank has had.
        parts: the files of what was counted, and of which batches.
    """

    number: int
    batches: Mapping[int, Batch]
    task: Task
    handed_on: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    done: set[int] = field(default_factory=set[int])
    holdings: int = 0
    parts: dict[Path, list[int]] = field(default_factory=dict[Path, list[int]])

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left."""
        return len(self.done) == len(self.batches)

    def take(self, done: Done) -> Iterator[Done]:
        """Hand on what is done for the first time."""
        if (done.index, done.number) in self.handed_on:
            return
        self.handed_on.add((done.index, done.number))
        if done.number == len(self.batches[done.index]) - 1:
            self.done.add(done.index)
        yield done


def _packed(indexes: list[int], counted: Selections) -> bytes:
    """What was counted of which batches, as the content of a file."""
    counts = counted.counted()
    head = json.dumps({"items": indexes, "crc": zlib.crc32(counts), "size": len(counts)})
    return head.encode() + b"\n" + counts


def _whole(path: Path) -> tuple[list[int], memoryview]:
    """The batches and the counts of such a file; an empty one has none."""
    content = memoryview(read_regular(path, _MOST_BYTES))
    if not len(content):
        return [], content
    end = bytes(content[: 2**24]).find(b"\n")
    try:
        head = cast("dict[str, Any]", json.loads(bytes(content[:end])))
        indexes, counts = cast("list[int]", head["items"]), content[end + 1 :]
        if head["size"] != len(counts) or head["crc"] != zlib.crc32(counts):
            raise ValueError("its checksum is another")
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): start again") from error
    return indexes, counts
