"""Locks that end with the process: of a folder in which one process at a time works, and of a file."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from covmerge.files.stores.regular_file import open_descriptor

_NAME = "lock"
REMOVED = "removed"  # a subfolder that is being removed

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


class TakenError(Exception):
    """Another process holds the lock."""


class Lock:
    """The held file `lock` of a folder; `release`, `remove_folder` and any kill of the process end it.

    filelock provides the system's lock on an open file. This class adds the file, which is created with its
    folder and removed with it, possibly while another process waits for the lock.

    Args:
        folder: the folder, which is created if missing; it must not be a link.

    Attributes:
        works: False if the file system has no locks.

    Raises:
        TakenError: another process holds the lock.
        OSError: the folder or the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        while True:
            try:
                if folder.is_symlink():  # the link's target would be emptied
                    raise OSError(errno.ELOOP, "It is a link, and is not followed", str(folder))
                folder.mkdir(parents=True, exist_ok=True)
                fd = open_descriptor(self._path, os.O_RDWR | os.O_CREAT)
            except (FileNotFoundError, FileExistsError):
                if _is_other_than_folder(folder):
                    raise
                continue  # a process that just ended removed the folder
            try:
                locked = _lock(fd)
                if locked is False:
                    raise TakenError
                self.works = locked is not None
                if _is_open_at(fd, self._path):
                    self._fd: int | None = fd
                    return
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the lock file of a process that just ended: try again with a new one

    def release(self) -> None:
        """Let another process take the lock; do nothing if that was done before."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _remove(self) -> None:
        """Remove the lock file, which is the last file of its folder, and release the lock."""
        if os.name == "nt":
            # Windows removes no open file: neither this one, nor that of another holder.
            self.release()
            with suppress(PermissionError):
                self._path.unlink()
        else:
            self._path.unlink()
            self.release()

    def clear_folder(self, only: Collection[str] | None = None) -> None:
        """Remove everything in the folder but the lock, or only the entries with one of these names.

        A folder is renamed first. A process that worked in it then no longer finds it, and puts nothing
        into it while it is removed.
        """
        removed = self._path.parent / REMOVED
        if removed.is_symlink():
            removed.unlink()
        elif removed.is_dir():  # left by a process that was killed while removing it
            shutil.rmtree(removed)
        for child in self._path.parent.iterdir():
            if only is not None and child.name not in only:
                continue
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child.rename(removed))
            elif child != self._path:
                child.unlink()

    def remove_folder(self, only: Collection[str] | None = None) -> None:
        """Remove the folder's contents, or entries with one of these names; then lock and folder."""
        self.clear_folder(only)
        # The lock file is removed last: until then no other process can start to work here.
        self._remove()
        try:
            self._path.parent.rmdir()
        except OSError as error:
            # Another process began between the two lines above, and the folder is now its own. Or the
            # folder holds more than was to be removed.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


@contextmanager
def held_file(path: Path) -> Generator[bool]:
    """Create a file that `remove_abandoned` leaves alone until it is renamed, or removed at the end.

    Yields:
        False if another process removed it before it was locked.
    """
    fd = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        yield not _is_taken(fd) and _is_open_at(fd, path)
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def remove_abandoned(path: Path) -> None:
    """Remove a file of `held_file` whose process was killed; without locks, nothing is known of it."""
    with suppress(OSError):
        fd = open_descriptor(path, os.O_WRONLY)
        try:
            if not _is_taken(fd, unknown=True) and _is_open_at(fd, path):
                path.unlink()
        finally:
            os.close(fd)


def _is_taken(fd: int, *, unknown: bool = False) -> bool:
    """Lock an open file, and return whether another process has; `unknown` if there are no locks."""
    # Windows neither writes to a locked file nor renames an open one.
    locked = None if os.name == "nt" else _lock(fd)
    return unknown if locked is None else not locked


def _lock(fd: int) -> bool | None:
    """Lock an open file; False: another process has it; None: the file system has no locks."""
    try:
        return lock_descriptor(fd, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None


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
