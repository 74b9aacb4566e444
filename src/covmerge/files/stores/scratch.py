"""A folder to make files in before they appear; what a kill leaves of one goes when the next is made."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from covmerge.files.stores.lock import Lock, TakenError

_TOKEN = "[a-z0-9_]{8}"


@contextmanager
def scratch_folder(beside: Path, prefix: str) -> Generator[Path]:
    """Make a folder that is removed at the end, and remove those that no process works in any more.

    Args:
        beside: the folder that it is made in, so that a file can be renamed out of it.
        prefix: what its name begins with.

    Raises:
        OSError: it cannot be made.

    Example:
        >>> from tempfile import mkdtemp
        >>> with scratch_folder(Path(mkdtemp()), ".work-") as folder:
        ...     _ = (folder / "file").write_text("")
        >>> folder.exists()
        False
    """
    _remove_abandoned(beside, re.compile(re.escape(prefix) + _TOKEN))
    folder, lock = _make(beside, prefix)
    try:
        yield folder
    finally:
        lock.remove_folder()


def _make(beside: Path, prefix: str) -> tuple[Path, Lock]:
    while True:
        folder = beside / f"{prefix}{token_hex(4)}"
        try:
            return folder, Lock(folder)
        except TakenError:
            continue  # by a process that takes it for an abandoned one


def _remove_abandoned(beside: Path, pattern: re.Pattern[str]) -> None:
    for folder in beside.iterdir():
        if not pattern.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        try:
            lock = Lock(folder)
        except (TakenError, OSError):
            continue  # it is in use, or is none of this user's
        if lock.works:
            lock.remove_folder()
        else:  # nothing tells whether it is in use
            lock.release()
