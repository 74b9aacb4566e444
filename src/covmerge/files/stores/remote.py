"""A remote folder as a read-only store: read by ranges, in parallel, with repeated attempts.

A request takes 10 to 100 ms of latency, however little it fetches. Large reads are therefore split into
parts of 1 to 8 MiB, several at once (`link.py`). Small reads are served from a window, which is fetched as
a whole: 1 MiB, and twice as much each time that a reader continues where it ended, up to 32 MiB.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from covmerge.base.errors import InputError
from covmerge.files.stores.address import OBJECTS, Address, address_of, local_path
from covmerge.files.stores.link import all_of, link_to, persist
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.paths import check_bare
from covmerge.files.stores.servers import CheckedFile, FileStat, ObjectServer, PageServer, Server
from covmerge.files.stores.store import Opened, Stamp

Found = TypeVar("Found")

_SMALL = 2**22  # smaller reads are served from windows
_WINDOW = 2**20
_WIDEST = 2**25
_HELD = 2**26  # bytes of all windows
_FRESH = 10.0  # seconds for which the answer about an opened file is used again
_LISTED = 1.0  # seconds for which a listing is used: names and folders are asked for in a row


class RemoteStore:
    """The files of a server below one path; the store is read-only.

    The server is asked about a file again after a while, so that a changed file ends the work early. The
    reader checks at the end, by `stamp`, that no file has changed.
    """

    folder = None

    def __init__(self, server: Server, path: str) -> None:
        self._server = server
        self._path = path
        self._stats = _Recent[FileStat](_FRESH)
        self._listings = _Recent[Mapping[str, FileStat | None]](_LISTED)
        self._sums: dict[tuple[str, FileStat], CheckedFile] = {}
        self._windows = _Windows()

    def __str__(self) -> str:
        return self._server.shown(self._path)

    def where(self, name: str) -> str:
        return self._server.shown(self._at(name))

    def names(self) -> list[str]:
        return [name for name, stat in self._listed().items() if stat is not None]

    def folders(self) -> list[str]:
        return [name for name, stat in self._listed().items() if stat is None]

    def check(self, name: str) -> None:
        check_bare(name, str(self))

    def is_file(self, name: str, *, follow: bool = True) -> bool:
        del follow  # a server has no links
        try:
            self._stat(name)
        except FileNotFoundError:
            return False
        return True

    def stamp(self, name: str) -> Stamp:
        """See `Store.stamp`; the server is always asked."""
        return _stamp(self._stat(name, anew=True))

    def version(self, name: str) -> str:
        """Return the server's version of a file; "": the server has none."""
        return self._stat(name).version

    def open(self, name: str, *, follow: bool = True) -> RemoteFile:
        del follow
        path, stat = self._at(name), self._stat(name)
        sums = None
        if not stat.version:
            sums = self._sums.setdefault((path, stat), CheckedFile(stat.size))
        return RemoteFile(self._server, path, stat, self._windows, sums)

    def inside(self, folder: str) -> RemoteStore:
        if not folder:
            return self
        inner = copy(self)  # which shares the answers and windows
        inner._path = self._at(folder)
        return inner

    def _at(self, name: str) -> str:
        return self._server.inside(self._path, name)

    def _listed(self) -> Mapping[str, FileStat | None]:
        found = self._listings.get(self._path)
        if found is None:
            found = ask(self._server, lambda: self._server.listed(self._path))
            self._listings.put(self._path, found)
            for name, stat in found.items():
                if stat is not None:
                    self._stats.put(self._at(name), stat)
        return found

    def _stat(self, name: str, *, anew: bool = False) -> FileStat:
        path = self._at(name)
        if anew or (stat := self._stats.get(path)) is None:
            stat = ask(self._server, lambda: self._server.stat(path))
            self._stats.put(path, stat)
        return stat


class RemoteFile(Opened):
    """A file that is read by requests."""

    def __init__(
        self, server: Server, path: str, stat: FileStat, windows: _Windows, sums: CheckedFile | None
    ) -> None:
        self._server = server
        self._path = path
        self._stat = stat
        self._windows = windows
        self._sums = sums
        self._link = link_to("/".join(server.shown(path).split("/")[:3]))
        self.stamp = _stamp(stat)

    def read_at(self, target: memoryview, offset: int) -> int:
        count = min(len(target), max(0, self._stat.size - offset))
        if not count:
            return 0
        if count >= _SMALL:
            self._fetch(target[:count], offset)
            return count
        held = self._windows.find(self._path, self._stat, offset)
        if held is None:
            length = self._windows.next(self._path, self._stat, offset)
            data = bytearray(min(max(count, length), self._stat.size - offset))
            self._fetch(memoryview(data), offset)
            held = _Window(self._stat, offset, bytes(data))
            self._windows.keep(self._path, held)
        begin = offset - held.start
        found = memoryview(held.data)[begin : begin + count]
        target[: len(found)] = found
        return len(found)

    def _fetch(self, target: memoryview, offset: int) -> None:
        whole = range(offset, offset + len(target))
        missing = [whole if self._sums is None else self._sums.blocks(whole)]
        length = sum(map(len, missing))

        async def fetch() -> None:
            await all_of(fetch_some() for _ in range(self._link.most(length)))

        async def fetch_some() -> None:
            while missing:
                async with self._link.turn():
                    if not missing:  # other requests took the rest meanwhile
                        return
                    part = _taken(missing, self._link.part(length))
                    read = await self._fetch_part(part, target, offset)
                if self._sums is not None:
                    await asyncio.to_thread(self._sums.check, read, part.start)

        _run(self._server, fetch)

    async def _fetch_part(self, part: range, target: memoryview, offset: int) -> memoryview:
        """Fetch a part of the file, and copy to memory that begins at `offset` what it has room for."""
        inside = offset <= part.start and part.stop <= offset + len(target)
        memory = target[part.start - offset :] if inside else memoryview(bytearray(len(part)))
        memory = memory[: len(part)]
        await persist(
            lambda: self._link.attempt(
                lambda: self._server.fetch(self._path, memory, part.start, self._stat), len(memory)
            )
        )
        if not inside:
            first = max(part.start, offset)
            stop = min(part.stop, offset + len(target))
            target[first - offset : stop - offset] = memory[first - part.start : stop - part.start]
        return memory


def _taken(missing: list[range], size: int) -> range:
    """Take the next bytes, at most `size`, off the missing ranges, and return them."""
    run = missing[0]
    if len(run) > size:
        missing[0] = run[size:]
    else:
        del missing[0]
    return run[:size]


@dataclass(frozen=True)
class _Window:
    """Bytes of a file that are held in memory, from `start` on."""

    stat: FileStat
    start: int
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class _Windows:
    """The last window of each file, up to a total size; all threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Window] = OrderedDict()

    def find(self, path: str, stat: FileStat, offset: int) -> _Window | None:
        """Return the window that has the byte at an offset; None: there is none."""
        held = self._last(path, stat)
        return held if held is not None and held.start <= offset < held.end else None

    def next(self, path: str, stat: FileStat, offset: int) -> int:
        """Return the length of the window to fetch from an offset on."""
        held = self._last(path, stat)
        if held is None or offset != held.end:
            return _WINDOW
        return min(2 * len(held.data), _WIDEST)

    def _last(self, path: str, stat: FileStat) -> _Window | None:
        with self._lock:
            held = self._held.get(path)
        return held if held is not None and held.stat == stat else None

    def keep(self, path: str, window: _Window) -> None:
        """Hold a window, and drop the oldest windows that exceed the total size."""
        with self._lock:
            self._held[path] = window
            self._held.move_to_end(path)
            while len(self._held) > 1 and sum(len(w.data) for w in self._held.values()) > _HELD:
                self._held.popitem(last=False)


class _Recent(Generic[Found]):
    """The server's answers by path, which are used for some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answers: dict[str, tuple[float, Found]] = {}

    def get(self, path: str) -> Found | None:
        asked, found = self._answers.get(path, (0.0, None))
        return found if time.monotonic() - asked < self._seconds else None

    def put(self, path: str, found: Found) -> None:
        self._answers[path] = (time.monotonic(), found)


def remote_store(address: Address) -> RemoteStore:
    """Return the folder at an address as a store.

    Raises:
        InputError: the required packages are not installed, or the environment asks for a cache.
    """
    if os.environ.get("COVMERGE_REMOTE_CACHE", "") not in ("", "0"):
        raise InputError(
            "COVMERGE_REMOTE_CACHE is set, and covmerge keeps nothing of remote files any more: unset it. "
            "To read sources more than once, download them and pass their folders"
        )
    return RemoteStore(*server_at(address))


def store_at(given: str | Path) -> LocalFolder | RemoteStore:
    """Return the folder at a path or an address as a store, for reading an output."""
    address = address_of(given)
    if address is None:
        return LocalFolder(local_path(given))
    return remote_store(address)


def server_at(address: Address) -> tuple[Server, str]:
    """Return the server of an address, and the server's name of the place."""
    if address.scheme in OBJECTS:
        return ObjectServer(address.scheme), address.path
    return PageServer(), f"{address.scheme}://{quote(address.path, safe=':/%[]')}"


def ask(
    server: Any, request: Callable[[], Awaitable[Found]], longest: float | None = None
) -> Found:
    """Carry out a request from any thread except the server's; see `persist`."""
    return _run(server, lambda: persist(request, longest))


def _run(server: Any, work: Callable[[], Awaitable[Found]]) -> Found:
    run: Any = import_module("fsspec.asyn")
    return run.sync(server.loop, work)


def _stamp(stat: FileStat) -> Stamp:
    """Return the size and a number for the version; 0: the server has no version."""
    if not stat.version:
        return stat.size, 0, 0
    version = hashlib.sha256(stat.version.encode()).digest()[:8]
    return stat.size, int.from_bytes(version, "big"), 0
