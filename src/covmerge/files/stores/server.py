"""A server as a store asks it, and the check of files whose version a server does not tell."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from covmerge.files.stores.retries import ChangedError


@dataclass(frozen=True)
class FileStat:
    """What a server says of a file.

    Attributes:
        size: bytes.
        version: what is another after every change; "": the server says nothing of the kind.
    """

    size: int
    version: str


class Server(Protocol):
    """A server, asked by coroutines that run in `loop`; a path is what it calls a file or folder.

    What fails is any error of a library (`retries.persist` tells what is worth another attempt).
    """

    @property
    def loop(self) -> Any:
        """The loop of events, in a thread of its own."""
        ...

    def inside(self, folder: str, name: str) -> str:
        """Return the path of what is in a folder."""
        ...

    def shown(self, path: str) -> str:
        """Return a path as it is written in recipes."""
        ...

    async def stat(self, path: str) -> FileStat:
        """Return what it says of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        ...

    async def listed(self, folder: str) -> Mapping[str, FileStat | None]:
        """Return what is in a folder, by name; None: a folder."""
        ...

    async def fetch(self, path: str, target: memoryview, offset: int, stat: FileStat) -> None:
        """Fill memory from a place in a file, or fail.

        Raises:
            ChangedError: it is no longer the file that `stat` describes.
        """
        ...


_BLOCK = 2**20


class CheckedFile:
    """Checksums of what was read of one file; for any thread.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()

    def blocks(self, asked: range) -> range:
        """Return the whole blocks that have the bytes of a range."""
        end = asked.stop + -asked.stop % _BLOCK
        return range(asked.start - asked.start % _BLOCK, min(end, self._size))

    def check(self, data: memoryview, offset: int) -> None:
        """Note what was read of whole blocks, and compare it with what was read of them before.

        Raises:
            ChangedError: it is not what was read before.
        """
        for start in range(0, len(data), _BLOCK):
            checksum = zlib.crc32(data[start : start + _BLOCK])
            with self._lock:
                before = self._sums.setdefault(offset + start, checksum)
            if checksum != before:
                raise ChangedError
