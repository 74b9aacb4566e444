"""Errors of the disk, with the file, the bytes needed and the bytes free."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from covmerge.base.errors import InputError, ResourceError
from covmerge.files.stores.lock import held_file, remove_abandoned

# Pattern of the names of files that `replace_file` leaves if its process is killed.
UNFINISHED = ".*.unfinished"
_UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}\.unfinished")
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def disk_errors(path: Path, needed: int | None = None) -> Generator[None, None, None]:
    """Turn an `OSError` raised while writing `path` into an error with a next step.

    `needed` are the bytes that the work still needs space for; None: not many.

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

    What earlier calls for the same file left when their process was killed is removed.

    Raises:
        ResourceError: the disk is full.
        InputError: there is no permission to write in the folder.
    """
    with disk_errors(path):
        for other in path.parent.glob(UNFINISHED):
            if finished_name(other.name) == path.name:
                remove_abandoned(other)
        while not _replaced(path, content.encode() if isinstance(content, str) else content):
            pass


def finished_name(name: str) -> str | None:
    """Return the name of the file that `replace_file` was to make of an unfinished one; None: it is none.

    Example:
        >>> finished_name(".report.html.0123abcd.unfinished")
        'report.html'
    """
    found = _UNFINISHED.fullmatch(name)
    return None if found is None else found[1]


def _replaced(path: Path, content: bytes) -> bool:
    """Write a file, unless another process took the unfinished one for abandoned just then."""
    unfinished = path.with_name(f".{path.name}.{token_hex(4)}.unfinished")
    with held_file(unfinished) as held:
        if held:
            unfinished.write_bytes(content)
            unfinished.replace(path)
    return held


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
