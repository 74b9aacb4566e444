"""The interface of stores of files for readers and writers of checkpoints, and walks over their folders."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from covmerge.base.errors import CheckpointError

# Numbers that change when a file is written: its size first, then times or a count.
Stamp = tuple[int, int, int]


class Opened(Protocol):
    """A file that is open for reading; it stays the same file whatever happens to its name.

    It is a context manager, which closes it.
    """

    def __enter__(self) -> Opened: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def stamp(self) -> Stamp:
        """Numbers that distinguish the file from a changed one."""
        ...

    def read_at(self, target: memoryview, offset: int) -> int:
        """Read straight into memory, and return the number of bytes; 0 at the end of the file.

        Raises:
            OSError: the disk or the server fails.
        """
        ...


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


class WritableStore(Store, Protocol):
    """A store that can be written by any thread, also over another thread's files.

    An impossible write raises an InputError, and a lack of space a ResourceError.
    """

    def inside(self, folder: str) -> WritableStore:
        """Return the store of a folder inside, which exists once there is something in it."""
        ...

    def exists(self, name: str) -> bool:
        """Return whether the name is taken, by an entry of any kind."""
        ...

    def create(self, name: str, size: int, start: bytes, *, needed: int) -> None:
        """Create a file of `size` bytes that begins with `start`, as a whole or not at all.

        An existing file is replaced.

        Args:
            name: the file's name.
            size: the file's size in bytes, for which space is reserved.
            start: the first bytes.
            needed: bytes for which there must be space, those of this file included.
        """
        ...

    def write(self, name: str, data: memoryview, offset: int) -> None:
        """Write all of the data into an existing file."""
        ...

    def append(self, name: str, data: bytes) -> None:
        """Append data to a file, or leave the file as it was."""
        ...

    def truncate(self, name: str, size: int) -> None:
        """Cut a file to a size."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or an empty folder."""
        ...

    def flush(self, names: Sequence[str]) -> None:
        """Wait until files and their names would survive a power loss."""
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


@dataclass(frozen=True)
class WritableFile(StoredFile):
    """A file of a writable store; it need not exist."""

    store: WritableStore

    def exists(self) -> bool:
        return self.store.exists(self.name)

    def put(self, content: bytes) -> None:
        """Replace the content of the file, as a whole or not at all."""
        self.store.create(self.name, len(content), content, needed=len(content))


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


def remove_others(store: WritableStore, keep: Collection[str], inside: str = "") -> list[str]:
    """Remove everything in a store except some regular files, and return the paths of what was removed.

    Args:
        store: the store; folders that become empty are removed too, without being returned.
        keep: the files, as paths in it.
        inside: the prefix of all paths.
    """
    removed: list[str] = []
    for folder in store.folders():
        inner = store.inside(folder)
        removed += remove_others(inner, keep, f"{inside}{folder}/")
        if store.exists(folder) and not (inner.names() or inner.folders()):
            store.remove(folder)
    for name in store.names():
        path = f"{inside}{name}"
        if path not in keep or not store.is_file(name, follow=False):
            store.remove(name)
            removed.append(path)
    return removed
