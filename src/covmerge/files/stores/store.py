"""The interface of stores of files for readers and writers of checkpoints, and walks over their folders."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from typing_extensions import Self

from covmerge.base.errors import CheckpointError

# Numbers that change when a file is written: its size first, then times or a count.
Stamp = tuple[int, int, int]


class Opened(ABC):
    """A file that is open for reading; it stays the same file whatever happens to its name.

    It is a context manager, which closes it. Its stamp is the one from when it was opened.
    """

    stamp: Stamp

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def read_at(self, target: memoryview, offset: int) -> int:
        """Read straight into memory, and return the number of bytes; 0 at the end of the file.

        Raises:
            OSError: the disk or the server fails.
        """


class Store(Protocol):
    """Files by name, in one place. Any thread may read."""

    @property
    def folder(self) -> Path | None:
        """The local folder that the store is; None: it is not local."""
        ...

    def where(self, name: str) -> str:
        """Return the name of a file in messages."""
        ...

    def names(self) -> list[str]:
        """Return the names of all entries that are no folders; a link to a folder is none.

        Raises:
            OSError: the store cannot be listed.
        """
        ...

    def folders(self) -> list[str]:
        """Return the names of the folders.

        Raises:
            OSError: the store cannot be listed.
        """
        ...

    def check(self, name: str) -> None:
        """Check a name from a stranger's file, which may lead elsewhere.

        Raises:
            CheckpointError: it is no bare name, or a link out of the store.
        """
        ...

    def is_file(self, name: str, *, follow: bool = True) -> bool:
        """Return whether there is a readable file of that name; `follow` is as for `open`."""
        ...

    def stamp(self, name: str) -> Stamp:
        """Return numbers that distinguish a file from a changed one.

        Raises:
            OSError: there is no such file.
        """
        ...

    def open(self, name: str, *, follow: bool = True) -> Opened:
        """Open a file for reading; `follow` says whether it may be a link, symbolic or hard.

        Raises:
            OSError: there is no such file, or it cannot be read.
        """
        ...

    def inside(self, folder: str) -> Store:
        """Return the store of a folder inside; "": the store itself."""
        ...


@dataclass(frozen=True)
class StoredFile:
    """A file of a store; `str` gives its name in messages."""

    store: Store
    name: str

    def __str__(self) -> str:
        return self.store.where(self.name)

    @property
    def suffix(self) -> str:
        """The suffix of the name, as for a path."""
        return PurePosixPath(self.name).suffix

    @property
    def path(self) -> Path:
        """The file's local path, for readers of other libraries.

        Raises:
            CheckpointError: the file is not in a local folder.
        """
        if self.store.folder is None:
            raise CheckpointError(
                f"{self} is a pickle, and those are read from folders of this machine: copy it there"
            )
        return self.store.folder / self.name

    def stamp(self) -> Stamp:
        return self.store.stamp(self.name)

    def open(self, *, follow: bool = True) -> Opened:
        return self.store.open(self.name, follow=follow)

    def read(self, limit: int, *, follow: bool = True) -> bytes:
        """Return the content, or the first `limit` bytes of a longer file.

        Raises:
            OSError: as for `open`.
        """
        with self.open(follow=follow) as opened:
            data = memoryview(bytearray(min(limit, opened.stamp[0])))
            done = 0
            while done < len(data) and (count := opened.read_at(data[done:], done)):
                done += count
        return bytes(data[:done])


def child(store: Store, name: str) -> StoredFile:
    """Return the file that a stranger's file names, after checking the name; it need not exist."""
    store.check(name)
    return StoredFile(store, name)


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of a local file: its size and its times.

    A writer can set back the time of modification. The time of the last change of the file or its entry
    (ctime) is set by the kernel.
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def tree(store: Store, inside: str = "") -> Iterator[str]:
    """Yield the sorted paths of all entries of a store; links and empty folders are entries too."""
    folders = set(store.folders())
    for name in sorted({*folders, *store.names()}):
        path = f"{inside}{name}"
        within = list(tree(store.inside(name), f"{path}/")) if name in folders else []
        yield from within or [path]


def file_at(store: Store, path: str) -> StoredFile:
    """Return the file at a path in a store; it need not exist."""
    *folders, name = path.split("/")
    for folder in folders:
        store.check(folder)
        store = store.inside(folder)
    return child(store, name)
