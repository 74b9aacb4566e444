"""A local folder as a store."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from io import FileIO
from pathlib import Path
from typing import TypeVar

from covmerge.files.stores.disk import disk_errors, fsync_path
from covmerge.files.stores.paths import safe_child
from covmerge.files.stores.regular_file import is_own, open_raw, opened, read_at, reserve, write_at
from covmerge.files.stores.store import Opened, Stamp, Store, StoredFile, stamp_of

AnyStore = TypeVar("AnyStore", bound=Store)


class LocalFolder:
    r"""The files of a folder. None stays open between calls, so the store can be sent to another process.

    A file may be read through a link. Nothing is written or resumed through a link, symbolic or hard.
    Any thread may write, also over another thread's files. An impossible write raises an InputError, and a
    lack of space a ResourceError.

    The folder exists, unless it is an inner one: that is created when something is put into it.

    Example:
        >>> from tempfile import mkdtemp
        >>> store = LocalFolder(Path(mkdtemp()))
        >>> store.create("a", 4, b"1", needed=4)
        >>> store.write("a", memoryview(b"2"), 3)
        >>> StoredFile(store, "a").read(100)
        b'1\x00\x002'
    """

    def __init__(self, folder: Path, *, inner: bool = False) -> None:
        self._folder = folder
        self._inner = inner

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def folder(self) -> Path:
        return self._folder

    def where(self, name: str) -> str:
        return str(self._folder / name)

    def names(self) -> list[str]:
        return [name for name, is_folder in self._entries() if not is_folder]

    def folders(self) -> list[str]:
        return [name for name, is_folder in self._entries() if is_folder]

    def check(self, name: str) -> None:
        safe_child(self._folder, name)

    def is_file(self, name: str, *, follow: bool = True) -> bool:
        path = self._folder / name
        return path.is_file() if follow else is_own(path)

    def stamp(self, name: str) -> Stamp:
        return stamp_of((self._folder / name).stat())

    def open(self, name: str, *, follow: bool = True) -> OpenedFile:
        return OpenedFile(open_raw(self._folder / name, follow=follow, only_name=not follow))

    def inside(self, folder: str) -> LocalFolder:
        return LocalFolder(self._folder / folder, inner=True) if folder else self

    def exists(self, name: str) -> bool:
        """Return whether the name is taken, by an entry of any kind."""
        return os.path.lexists(self._folder / name)

    def create(self, name: str, size: int, start: bytes, *, needed: int) -> None:
        """Create a file, or replace an existing one, as a whole or not at all.

        It has `size` bytes, for which space is reserved, and begins with `start`. An error names the bytes
        that are `needed` in all.
        """
        path = self._folder / name
        unfinished = path.with_name(unfinished_name(path.name))  # never half-made under its name
        with disk_errors(path, needed):
            try:
                if self._inner:
                    self._folder.mkdir(parents=True, exist_ok=True)
                unfinished.unlink(missing_ok=True)
                with opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                    reserve(fd, size)
                    write_at(fd, memoryview(start), 0)
                unfinished.replace(path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise

    def put(self, name: str, content: bytes) -> None:
        """Create a small file, or replace the content of an existing one, as a whole or not at all."""
        self.create(name, len(content), content, needed=len(content))

    def write(self, name: str, data: memoryview, offset: int) -> None:
        """Write all of the data into an existing file."""
        path = self._folder / name
        with disk_errors(path, len(data)), opened(path, os.O_WRONLY) as fd:
            write_at(fd, data, offset)

    def append(self, name: str, data: bytes) -> None:
        """Append data to a file, or leave the file as it was."""
        path = self._folder / name
        with disk_errors(path), opened(path, os.O_WRONLY | os.O_APPEND) as fd:
            size = os.fstat(fd).st_size
            if os.write(fd, data) < len(data):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, name: str, size: int) -> None:
        path = self._folder / name
        with disk_errors(path), opened(path, os.O_WRONLY) as fd:
            os.ftruncate(fd, size)

    def remove(self, name: str) -> None:
        """Remove a file, or an empty folder."""
        path = self._folder / name
        with disk_errors(path):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()

    def remove_others(self, keep: Collection[str], inside: str = "") -> list[str]:
        """Remove everything except some regular files, and return the paths of what was removed.

        Folders that become empty are removed too, without being returned. `inside` begins all paths.
        """
        removed: list[str] = []
        for folder in self.folders():
            inner = self.inside(folder)
            removed += inner.remove_others(keep, f"{inside}{folder}/")
            if self.exists(folder) and not inner._entries():
                self.remove(folder)
        for name in self.names():
            path = f"{inside}{name}"
            if path not in keep or not self.is_file(name, follow=False):
                self.remove(name)
                removed.append(path)
        return removed

    def flush(self, names: Sequence[str]) -> None:
        """Wait until files and their names would survive a power loss."""
        for path in (*(self._folder / name for name in names), self._folder):
            with disk_errors(path):
                fsync_path(path)

    def _entries(self) -> list[tuple[str, bool]]:
        """Return the name of each entry, and whether it is a folder."""
        if self._inner and not self._folder.exists():
            return []
        with os.scandir(self._folder) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


class OpenedFile(Opened):
    """An open file of this machine."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.stamp = stamp_of(os.fstat(file.fileno()))

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_at(self, target: memoryview, offset: int) -> int:
        return read_at(self._file, target, offset)


def unfinished_name(name: str) -> str:
    """Return the name of a file while it is written; a kill may leave it under that name."""
    return f".{name}.new"


def local_store(given: Path | AnyStore) -> AnyStore | LocalFolder:
    """Return a store; a path is turned into the store of that folder."""
    return LocalFolder(given) if isinstance(given, Path) else given


def local_file(given: Path | StoredFile) -> StoredFile:
    """Return a file of a store; a path is turned into the file of a local folder."""
    return StoredFile(LocalFolder(given.parent), given.name) if isinstance(given, Path) else given
