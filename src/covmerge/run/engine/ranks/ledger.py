"""What each rank has done, in a file of its own, whose time of change says that it is still there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from covmerge.base.errors import CovmergeError
from covmerge.base.threads import start
from covmerge.base.types import Json
from covmerge.files.checkpoints.journal import check_seal, parsed, sealed
from covmerge.files.stores.disk import disk_errors
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.regular_file import open_raw, read_some

_SUFFIX = ".jsonl"
_REFRESH_AFTER = 0.5  # seconds
_MOST_AT_ONCE = 64 * 2**20  # bytes of a ledger that are read at a time


class Ledger:
    """The file of this rank. It says every `beat` seconds that its process lives, until it is closed.

    The ledgers of the others are read as often, however long this rank is busy with an item.
    """

    def __init__(self, folder: Path, who: str, beat: float, others: Ledgers) -> None:
        self._others = others
        self._store = LocalFolder(folder)
        self._name = who + _SUFFIX
        self._path = folder / self._name
        with disk_errors(self._path):
            self._path.touch(exist_ok=False)
        self._appending = threading.Lock()
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, args=(beat,), daemon=True)
        start(self._beating)

    def append(self, record: Mapping[str, Json]) -> None:
        """Tell the others of something."""
        with self._appending:  # hashes are told of by other threads than items
            self._store.append(self._name, sealed(record, "what a rank did"))

    def close(self) -> None:
        """Tell the others that this rank does no more, if there still is where to tell it."""
        self._closed.set()
        self._beating.join()
        with suppress(CovmergeError):
            self.append({"left": True})

    def _beat(self, every: float) -> None:
        while not self._closed.wait(every):
            with suppress(OSError):
                os.utime(self._path)
                self._others.refresh()


class Ledgers:
    """The files of all ranks of a folder, as one of them sees them.

    Which rank is gone is judged by this process's clock alone: one whose file has not changed for
    `patience` seconds while it was watched, or that has said so.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder = folder
        self._patience = patience
        self._read: dict[str, int] = {}
        self._changed: dict[str, tuple[object, float]] = {}
        self._left: set[str] = set()
        self._alive: set[str] = set()
        self._said: dict[int | str, list[tuple[str, dict[str, Any]]]] = {}
        self._refreshed = 0.0
        self._reading = threading.Lock()  # the thread that reads ahead asks too

    def refresh(self) -> None:
        """Read what was added since the last call."""
        with self._reading, suppress(FileNotFoundError):
            self._refreshed = time.monotonic()
            for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
                with suppress(FileNotFoundError):
                    self._read_added(path.stem, path)

    def refresh_if_due(self) -> None:
        """Read what was added, unless that was a moment ago: on a network it asks for every rank's file."""
        if time.monotonic() - self._refreshed > _REFRESH_AFTER:
            self.refresh()

    def take(self, stage: int | str) -> list[tuple[str, dict[str, Any]]]:
        """Return what was said of a stage since this was last asked, each with who said it."""
        with self._reading:
            return self._said.pop(stage, [])

    def is_gone(self, who: str) -> bool:
        """Whether a rank has left, or seems to have been killed."""
        self.refresh_if_due()  # else a rank that nobody read would count as gone
        _, since = self._changed.setdefault(who, (None, time.monotonic()))
        return who in self._left or time.monotonic() - since > self._patience

    def was_there(self, who: str) -> bool:
        """Whether a rank has done something, or said that it lives, since its file was first read."""
        return who in self._alive

    def all_gone(self) -> bool:
        """Whether nobody is there."""
        return all(map(self.is_gone, list(self._changed)))

    def _read_added(self, who: str, path: Path) -> None:
        # Opened anew each time: on NFS that is what shows the changes of other machines.
        with open_raw(path, follow=False) as file:
            status = os.fstat(file.fileno())
            state = (status.st_size, status.st_mtime_ns)
            before, _ = self._changed.get(who, (None, 0.0))
            if before != state:
                if before is not None:
                    self._alive.add(who)
                self._changed[who] = (state, time.monotonic())
            begin = self._read.get(who, 0)
            if status.st_size <= begin:
                return
            file.seek(begin)
            content = read_some(file, _MOST_AT_ONCE)
        for line in content.split(b"\n")[:-1]:
            try:
                check_seal(line)
                record = parsed(line)
            except ValueError:
                break  # not all of it is there yet
            begin += len(line) + 1
            self._hear(who, record)
        self._read[who] = begin

    def _hear(self, who: str, record: dict[str, Any]) -> None:
        if record.get("left") is True:
            self._left.add(who)
        elif isinstance(stage := record.get("stage"), int | str):
            self._said.setdefault(stage, []).append((who, record))
