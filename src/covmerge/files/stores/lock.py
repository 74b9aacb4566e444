"""A folder that one process at a time works in, by a lock that ends with the process."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from filelock import lock_descriptor

from covmerge.files.stores.regular_file import open_descriptor

_NAME = "lock"
REMOVED = "removed"  # a folder of the folder, while it is removed

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


class TakenError(Exception):
    """Another process has the lock."""


class Lock:
    """The file `lock` of a folder, held; `release` or `remove_folder` ends that, and so does any kill.

    The system's lock on an open file is filelock's; here is what it is of: a file in a folder that is made
    with it and goes with it, which may happen at any moment while another process waits to have it.

    Args:
        folder: made if it is not there; no link.

    Attributes:
        works: False where the file system knows no locks.

    Raises:
        TakenError: another process has it.
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self.works = True
        while True:
            try:
                if folder.is_symlink():  # what it leads to would be emptied
                    raise OSError(errno.ELOOP, "It is a link, and is not followed", str(folder))
                folder.mkdir(parents=True, exist_ok=True)
                fd = open_descriptor(self._path, os.O_RDWR | os.O_CREAT)
            except (FileNotFoundError, FileExistsError):
                if _is_other_than_folder(folder):
                    raise
                continue  # the folder was removed by a process that just ended
            try:
                self._lock(fd)
                if _is_open_at(fd, self._path):
                    self._fd: int | None = fd
                    return
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the lock of a process that just ended: try again with a new one

    def release(self) -> None:
        """Let another process have it, unless that was done."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _remove(self) -> None:
        """Remove the file as the last of its folder, and release it."""
        if os.name == "nt":
            # No open file is removed there: neither this one, nor that of its holder meanwhile.
            self.release()
            with suppress(PermissionError):
                self._path.unlink()
        else:
            self._path.unlink()
            self.release()

    def clear_folder(self, only: Collection[str] | None = None) -> None:
        """Remove all that the folder holds but the lock, or what has one of these names.

        A folder is renamed first: a process that worked in it finds it gone, and puts nothing into it
        while it is removed.
        """
        removed = self._path.parent / REMOVED
        if removed.is_symlink():
            removed.unlink()
        elif removed.is_dir():  # by a process that was killed meanwhile
            shutil.rmtree(removed)
        for child in self._path.parent.iterdir():
            if only is not None and child.name not in only:
                continue
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child.rename(removed))
            elif child != self._path:
                child.unlink()

    def remove_folder(self, only: Collection[str] | None = None) -> None:
        """Remove what the folder holds, or what has one of these names; then the lock and the folder."""
        self.clear_folder(only)
        # The lock goes last: until then nobody else can begin to work here.
        self._remove()
        try:
            self._path.parent.rmdir()
        except OSError as error:
            # Another process began between the two lines above: the folder is now its own. Or it holds
            # more than was to be removed.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def _lock(self, fd: int) -> None:
        try:
            taken = not lock_descriptor(fd, blocking=False)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.works = False
        else:
            if taken:
                raise TakenError


def _is_open_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_other_than_folder(path: Path) -> bool:
    try:
        return not stat.S_ISDIR(path.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
