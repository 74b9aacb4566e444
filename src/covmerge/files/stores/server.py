"""What a store of another machine asks of whoever has its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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

    async def fetch(self, path: str, target: memoryview, offset: int, seen: FileStat) -> None:
        """Fill memory from a place in a file, or fail.

        Raises:
            ChangedError: it is no longer the file that was seen.
        """
        ...
