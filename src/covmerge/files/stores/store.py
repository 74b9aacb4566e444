"""What readers and writers of checkpoints ask of a place of files, and walks over its folders."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from covmerge.base.errors import CheckpointError

# What changes when a file is written: its size first, then times or a count.
Stamp = tuple[int, int, int]


class Opened(Protocol):
    """A file that is open to be read; whatever becomes of its name, it stays the same one.

    A context manager, which closes it.
    """

    def __enter__(self) -> Opened: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def stamp(self) -> Stamp:
        """What tells it from a changed one."""
        ...

    def read_at(self, target: memoryview, offset: int) -> int:
        """Read straight into memory, and return how many bytes it were: 0 at the end of the file.

        Raises:
            OSError: the disk, or whatever it is, fails.
        """
        ...


class Store(Protocol):
    """Files by name, in one place. Any thread may read."""

    @property
    def folder(self) -> Path | None:
        """The folder of this machine that it is, if it is one."""
        ...

    def where(self, name: str) -> str:
        """What messages call a file."""
        ...

    def names(self) -> list[str]:
        """Everything in it that is no folder; a link to one is none.

        Raises:
            OSError: it cannot be listed.
        """
        ...

    def folders(self) -> list[str]:
        """The folders in it.

        Raises:
            OSError: it cannot be listed.
        """
        ...

    def check(self, name: str) -> None:
        """Refuse a name from a stranger's file that may lead elsewhere.

        Raises:
            CheckpointError: it is not a bare name, or a link out of the store.
        """
        ...

    def is_file(self, name: str, *, follow: bool = True) -> bool:
        """Whether there is a file of that name which can be read; `follow` is as for `open`."""
        ...

    def stamp(self, name: str) -> Stamp:
        """What tells a file from a changed one.

        Raises:
            OSError: there is none.
        """
        ...

    def open(self, name: str, *, follow: bool = True) -> Opened:
        """Open a file to be read; `follow` says whether it may be a link, symbolic or hard.

        Raises:
            OSError: there is no such file, or it cannot be read.
        """
        ...

    def inside(self, folder: str) -> Store:
        """Return the store of a folder in it; "": itself."""
        ...


class WritableStore(Store, Protocol):
    """A store that can be written to, by any thread, also over what another has written.

    What cannot be written is an InputError, and what there is no room for a ResourceError.
    """

    def inside(self, folder: str) -> WritableStore:
        """Return the store of a folder in it, which is there once there is something in it."""
        ...

    def exists(self, name: str) -> bool:
        """Whether the name is taken, by whatever it is."""
        ...

    def create(self, name: str, size: int, start: bytes, *, needed: int) -> None:
        """Make a file of `size` bytes that begins with `start`, whole or not at all.

        It takes the place of one that is there.

        Args:
            name: its name.
            size: its bytes, for which space is reserved.
            start: its first bytes.
            needed: bytes that there has to be room for, this file's among them.
        """
        ...

    def write(self, name: str, data: memoryview, offset: int) -> None:
        """Write all of the data into a file that there is."""
        ...

    def append(self, name: str, data: bytes) -> None:
        """Put data at the end of a file, or leave it as it was."""
        ...

    def truncate(self, name: str, size: int) -> None:
        """Cut a file off."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or an empty folder."""
        ...

    def flush(self, names: Sequence[str]) -> None:
        """Wait until files, and their names, would survive the end of the machine's power."""
        ...


@dataclass(frozen=True)
class StoredFile:
    """A file of a store, as `str` names it in messages."""

    store: Store
    name: str

    def __str__(self) -> str:
        return self.store.where(self.name)

    @property
    def suffix(self) -> str:
        """As that of a path."""
        return PurePosixPath(self.name).suffix

    @property
    def path(self) -> Path:
        """The file's path, for readers that are not our own.

        Raises:
            CheckpointError: it is in no folder of this machine.
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
        """Return the content, or the first `limit` bytes of a longer one.

        Raises:
            OSError: as `open`.
        """
        with self.open(follow=follow) as opened:
            data = memoryview(bytearray(min(limit, opened.stamp[0])))
            done = 0
            while done < len(data) and (count := opened.read_at(data[done:], done)):
                done += count
        return bytes(data[:done])


@dataclass(frozen=True)
class WritableFile(StoredFile):
    """A file of a store that can be written to; it need not be there."""

    store: WritableStore

    def exists(self) -> bool:
        return self.store.exists(self.name)

    def put(self, content: bytes) -> None:
        """Make it this content, whole or not at all, in the place of whatever has the name."""
        self.store.create(self.name, len(content), content, needed=len(content))


def child(store: Store, name: str) -> StoredFile:
    """Return the file that a stranger's file names; it need not exist."""
    store.check(name)
    return StoredFile(store, name)


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of a file of this machine: its size and its times.

    The time of modification can be set back by a writer; that of the last change of the file
    or of its entry (ctime) is the kernel's.
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def tree(store: Store, inside: str = "") -> Iterator[str]:
    """Return all that a store holds, as sorted paths in it; links and empty folders as they are."""
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
    """Remove all that a store holds but some regular files; return what that was.

    Args:
        store: the store; folders left empty in it are removed without a word.
        keep: the files, as paths in it.
        inside: what all paths begin with.
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
