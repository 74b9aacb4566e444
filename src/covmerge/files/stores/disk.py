"""Errors of the disk, with the file, the bytes needed and the bytes free."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from covmerge.base.errors import InputError, ResourceError

# Pattern of the names of files that `replace_file` leaves if its process is killed.
UNFINISHED = ".*.unfinished"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def disk_errors(path: Path, needed: int | None = None) -> Generator[None, None, None]:
    """Turn an `OSError` raised while writing `path` into an error with a next step.

    Args:
        path: the file or folder being written.
        needed: bytes that the work still needs space for; None: not many.

    Raises:
        ResourceError: the disk or a quota is full, or the file is larger than allowed.
        InputError: any other error, such as a folder without permission to write.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            wanted = "" if needed is None else f"{needed} bytes needed, "
            raise ResourceError(
                f"no room for {path}: {wanted}{free_bytes(path)} bytes free ({error.strerror}); "
                "free some space or choose another output folder"
            ) from error
        if error.errno == errno.EFBIG:
            raise ResourceError(
                f"{path} grows larger than its file system or the limit of this process "
                "(ulimit -f) allows: pass a smaller shard size"
            ) from error
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file, or leave it as it was; another process may write it at the same time.

    Raises:
        ResourceError: the disk is full.
        InputError: there is no permission to write in the folder.
    """
    unfinished = path.with_name(f".{path.name}.{token_hex(4)}.unfinished")
    with disk_errors(path):
        try:
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Make the kernel put a file, or the names in a folder, on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder, and puts its names on the disk itself
    fd = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of `path`, which need not exist yet."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free
