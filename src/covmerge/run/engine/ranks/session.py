"""What ranks have in common while one of them leads: a folder beside the output.

    models/.merged.covmerge-partial/ranks/0/    0: the first to lead; who takes over from it begins 1
        plan                                    what all do, and with how many threads
        0.1f2e3d4c.jsonl                        what a rank has done; see `ledger`
        stage-0                                 the items of a pass, or of the merge
        stage-files                             the files of the output, when all of them are written
        claims/0-17.0                           whose an item is; see `claims`
        0-0.1f2e3d4c-0.counted                  what a rank has counted in a pass

Nobody waits for anybody at any time but for work to be done: no rank talks to another.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from covmerge.base.errors import CheckpointError, CovmergeError, InputError
from covmerge.base.settings import Hint
from covmerge.base.types import Json
from covmerge.base.version import __version__
from covmerge.files.checkpoints.journal import Entry, check_seal, parsed, sealed
from covmerge.files.stores.disk import disk_errors, replace_file
from covmerge.files.stores.regular_file import read_regular
from covmerge.run.engine.executor import error_named, named_error
from covmerge.run.engine.ranks.claims import Holding
from covmerge.run.engine.ranks.ledger import Ledger, Ledgers
from covmerge.run.engine.ranks.rank import Rank

_PLAN = "plan"
_MOST_BYTES = 2**28  # of a plan, or of a stage
_POLL = 0.2  # seconds between two reads of the ledgers
_BEAT = 10.0  # seconds after which a rank says that it is there,
_BEATS = 12  # and as often at least while others would take it for gone


class LeaderGoneError(Exception):
    """The rank that leads was killed, has given up, or has published."""


class Session:
    """A rank's part in what all do while one of them leads (None: this rank); a context manager.

    A rank that is not heard of is taken to be there for seconds of `patience`.

    Attributes:
        who: this rank, as no other one is called, before or after.
        leads: whether it is this rank that begins, keeps the journal and publishes.

    Raises (on entering the context):
        LeaderGoneError: the folder is gone.
        InputError: it cannot be written to.
    """

    def __init__(self, folder: Path, rank: Rank, patience: float, leader: str | None) -> None:
        self.folder = folder
        self.rank = rank
        self.who = f"{rank.number}.{token_hex(4)}"
        self.ledgers = Ledgers(folder, patience)
        self.leader = self.who if leader is None else leader
        self.leads = leader is None
        self._patience = patience

    def __enter__(self) -> Session:
        try:
            beat = min(_BEAT, self._patience / _BEATS)
            self._ledger = Ledger(self.folder, self.who, beat, self.ledgers)
        except InputError:
            self.check()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.close()

    @property
    def was_led(self) -> bool:
        """Whether the leader has shown that it is alive: else a killed merge may just lie here."""
        return self.ledgers.was_there(self.leader)

    def begin(self, plan: str, threads: int) -> None:
        """Let the others in: the output's files are there."""
        versions = {"plan": plan, "covmerge": __version__}
        record = {**versions, "leader": self.who, "threads": threads}
        replace_file(self.folder / _PLAN, sealed(record, _PLAN))

    def tell(self, record: Mapping[str, Json]) -> None:
        """Tell the others of something.

        Raises:
            LeaderGoneError: it is all over.
        """
        try:
            self._ledger.append(record)
        except InputError as error:
            self.check()
            if not self.leads and isinstance(error.__cause__, FileNotFoundError):
                raise LeaderGoneError from error  # the folder is being removed, file by file
            raise

    def failed(self, stage: int | str, error: Exception) -> None:
        """Tell the others of an error here, which ends the merge.

        Raises:
            LeaderGoneError: it is all over, and the error is only what came of it.
        """
        self.check()
        kind, message = named_error(error)
        with suppress(CovmergeError, LeaderGoneError):
            self.tell({"stage": stage, "error": kind, "message": message})

    def open_stage(self, stage: int | str, items: Json) -> None:
        """Say which items a stage has, or what else is to be known of it."""
        replace_file(self._stage(stage), sealed({"items": items}, "stage"))

    def stage(self, stage: int | str) -> Any:
        """Return what was said of a stage, which the rank that leads comes to as soon as all others.

        Raises:
            LeaderGoneError: it does not.
        """
        while (record := _read(self._stage(stage))) is None:
            self.wait()
        return record["items"]

    def holding(self, stage: int | str, number: int) -> Holding:
        """Return what this rank claims of a stage with.

        Raises:
            LeaderGoneError: it is all over.
            InputError: the folder cannot be written to.
        """
        try:
            return Holding(self.folder, stage, self.who, number)
        except (CovmergeError, OSError):
            self.check()
            raise

    def heard(self, stage: int | str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what ranks say of a stage, each with who says it; raise the error that one tells."""
        for who, record in self.ledgers.take(stage):
            if "error" in record:
                raise error_named(str(record["error"]), str(record.get("message")))
            yield who, record

    def wait(self) -> None:
        """Wait a moment for others, and read what they have done.

        Raises:
            LeaderGoneError: the rank that leads is gone.
        """
        time.sleep(min(_POLL, self._patience / _BEATS))
        self.ledgers.refresh()
        self.check()

    def check(self) -> None:
        """Raise LeaderGoneError if the rank that leads is gone, and with it the session."""
        there = self.folder.exists()
        if self.leads:
            if not there:
                raise InputError(f"{self.folder} was removed while ranks were at work in it")
        elif not there or self.ledgers.is_gone(self.leader):
            raise LeaderGoneError

    def _stage(self, stage: int | str) -> Path:
        return self.folder / f"stage-{stage}"


class Gathering:
    """Where the ranks of one output meet: the sessions of those that led, one after the other."""

    def __init__(self, folder: Path, rank: Rank, patience: float) -> None:
        self._folder = folder
        self._rank = rank
        self._patience = patience
        self._over: set[str] = set()

    def lead(self) -> Session:
        """Return a session that this rank leads; it has the lock of the output.

        Raises:
            InputError: another began at the same moment, as the file system's locks are none.
        """
        number = 1 + max((int(folder.name) for folder in self._sessions()), default=-1)
        folder = self._folder / str(number)
        with disk_errors(folder):
            self._folder.mkdir(exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                raise InputError(
                    f"another rank leads in {folder} at the same time: the file system's locks do not "
                    f"work between machines. Start again with {Hint('resume')}"
                ) from None
        return Session(folder, self._rank, self._patience, None)

    def earlier(self) -> list[Entry]:
        """Return what ranks of earlier sessions say they have written, and remove these.

        As with a journal, it is read back before it is believed.
        """
        entries: list[Entry] = []
        *ended, _ = self._sessions()
        for folder in ended:
            for path in sorted(folder.glob("*.jsonl")):
                entries += _entries(path)
            shutil.rmtree(folder, ignore_errors=True)
        return entries

    def join(
        self, plan: str, ended: Callable[[], bool], patience: float
    ) -> tuple[Session, int] | None:
        """Join the ranks that are at work, and wait for one that leads if there are none yet.

        `plan` is the digest of what this rank would do. Return the session, and the number of threads that
        all compute with; None: the merge has ended.

        Raises:
            InputError: nobody leads, or those at work merge something else.
        """
        same = (plan, __version__)
        strange: str | None = None
        watched: dict[str, Ledgers] = {}
        until = time.monotonic() + patience
        while not ended():
            for newest in self._sessions()[-1:]:
                record = _read(newest / _PLAN)
                if record is not None and record["leader"] in self._over:
                    continue
                if record is not None and (record["plan"], record["covmerge"]) == same:
                    leader = cast("str", record["leader"])
                    threads = cast("int", record["threads"])
                    return Session(newest, self._rank, self._patience, leader), threads
                strange = newest.name if record is not None else None
                ledgers = watched.setdefault(newest.name, Ledgers(newest, self._patience))
                ledgers.refresh()
                if record is None and not ledgers.all_gone():
                    until = time.monotonic() + patience
            if time.monotonic() > until:
                raise InputError(self._alone(strange, patience))
            time.sleep(_POLL)
        return None

    def leave(self, session: Session) -> None:
        """Do not join a session again, as who led it is gone."""
        self._over.add(session.leader)

    def _alone(self, strange: str | None, patience: float) -> str:
        if strange is not None:
            return (
                f"{self._rank} would merge something else than those at work in {self._folder}: recipe, "
                "sources, torch and covmerge must be the same for all ranks, and the sources the same "
                "files of a shared folder"
            )
        return (
            f"{self._rank} found no rank that leads the merge in {self._folder} for {patience:.0f} s: it "
            "did not start (then its own message says why), was killed, or the folder is not shared by "
            "all machines (of an output on a URL it lies in COVMERGE_CACHE). Start the merge again, with "
            f"{Hint('resume')} if it had begun"
        )

    def _sessions(self) -> list[Path]:
        if self._folder.is_symlink():
            raise InputError(f"{self._folder} is a symbolic link, not ours: remove it")
        try:
            folders = [path for path in self._folder.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return []
        return sorted(folders, key=lambda folder: int(folder.name))


def _read(path: Path) -> dict[str, Any] | None:
    """The record of a file of one line; None: it is not there yet."""
    with suppress(FileNotFoundError):
        line = read_regular(path, _MOST_BYTES).rstrip(b"\n")
        try:
            check_seal(line)
            return parsed(line)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): start over with {Hint('overwrite')}"
            ) from error
    return None


def _entries(path: Path) -> list[Entry]:
    """Items in a ledger that a killed rank left; of a torn line nothing is known."""
    found: list[Entry] = []
    for line in read_regular(path, _MOST_BYTES).split(b"\n")[:-1]:
        with suppress(ValueError):
            check_seal(line)
            found.append(Entry.from_json(parsed(line)))
    return found
