"""Destinations: the place where an output appears, all at once, and the place of the work until then.

The work on a local folder is done in a folder beside it, and one rename makes it visible.

    models/.merged.covmerge-partial/    while the merge runs, or after it was killed
        lock                            held by the process that does the work
        journal.jsonl                   finished work, from which a merge can be resumed
        output/                         becomes models/merged
        replaced/                       the old models/merged, while it is exchanged
        ranks/                          shares of the work, if several processes share it
        removed/                        one of these folders, while it is removed

Only `output/` is ever renamed into place, so a finished output has no trace of the work. Other files there
belong to somebody else, and are never removed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from covmerge.base.errors import InputError
from covmerge.files.stores.address import local_path
from covmerge.files.stores.disk import disk_errors, fsync_path
from covmerge.files.stores.local import LocalFolder, unfinished_name
from covmerge.files.stores.lock import REMOVED, Lock
from covmerge.files.stores.store import Store

_PARTIAL = ".covmerge-partial"
_JOURNAL = "journal.jsonl"
_LAID = {  # whether each entry is a folder
    "lock": False,
    _JOURNAL: False,
    unfinished_name(_JOURNAL): False,
    "output": True,
    "replaced": True,
    "ranks": True,
    REMOVED: True,
}


class Destination:
    """A local folder that an output becomes. One process at a time holds it.

    `str` gives its name in messages. The caller decides when it may be written, replaced or resumed
    (`files/checkpoints/staging.py`). An impossible request raises an InputError, and a lack of space a
    ResourceError.

    Args:
        out: the folder; symbolic links are resolved, so a link continues to point to it.

    Attributes:
        work: the store of the files that become the output.
        journal: the file that records how far the work has come.
        aside: the place of the work.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._folder = _resolve(out)
        self.aside = _partial_of(self._folder)
        self._replaced = self.aside / "replaced"
        self.work = LocalFolder(self.aside / "output")
        self.journal = self.aside / _JOURNAL
        self._lock: Lock | None = None

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def output(self) -> Store:
        """The store of the output, which need not exist yet."""
        return LocalFolder(self._out)

    def share(self) -> None:
        """Let processes of other machines work on the output too: here they see the work beside it.

        Raises:
            InputError: the work would be in a place that other machines do not see.
        """

    def is_made_here(self) -> bool:
        """Return whether the present output was made from this place of work; asked if work is shared."""
        return True

    def occupant(self) -> object | None:
        """Return an object for what is there now, equal until something replaces it; None: nothing.

        Raises:
            InputError: something is there that an output can never replace.
        """
        if (around := _work_around(self._folder)) is not None:
            raise InputError(
                f"the output {self} has the place of the work on another one ({around}), which is removed "
                "when that is finished: choose another name"
            )
        try:
            status = self._folder.stat()
        except FileNotFoundError:
            return None
        except NotADirectoryError:  # a parent of the output is no folder
            status = None
        if status is None or not stat.S_ISDIR(status.st_mode):
            raise InputError(f"the output {self} exists and is no folder: choose another name")
        if os.path.ismount(self._folder):
            raise InputError(
                f"the output {self} is a mount point, which cannot be replaced as a whole: "
                f"choose a folder inside it, such as {self._folder / 'merged'}"
            )
        return status.st_ino, status.st_ctime_ns  # inodes of removed folders are used again

    def take(self) -> bool:
        """Lock the destination until the process ends at most; False: the file system has no locks.

        Raises:
            TakenError: another process holds it.
        """
        _refuse_link(self.aside)
        with disk_errors(self.aside):
            _refuse_strange(self.aside)
            self._lock = Lock(self.aside)
        return self._lock.works

    def recover(self) -> bool:
        """Undo a `publish` that was killed half way; return True if an old output was restored."""
        if not self._replaced.exists() or os.path.lexists(self._folder):
            return False
        with disk_errors(self.aside):
            self._replaced.rename(self._folder)
        return True

    def begun(self) -> bool:
        """Return whether there is work that can be resumed: a journal, and the files that it describes.

        A journal alone is left if cleaning up was killed.
        """
        if not (os.path.lexists(self.journal) and self.work.folder.exists()):
            return False
        _refuse_link(self.work.folder)
        return True

    def begin(self) -> None:
        """Remove any existing work, and start new work."""
        assert self._lock is not None, "take it first"
        with disk_errors(self.aside):
            self._lock.clear_folder(_LAID)
            self.work.folder.mkdir()

    def publish(self) -> None:
        """Make the work the output in one step, replacing an existing one; it survives a power loss.

        Meanwhile a reader finds the old output, the new one or none, but never a part.
        """
        with disk_errors(self._folder):
            for path in _walk(self.work.folder):
                fsync_path(path)
            self._exchange()
            fsync_path(self._folder.parent)

    def release(self) -> None:
        """Let another process take the destination; the work is kept."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove the work, and let another process take the destination; do nothing if it is not taken."""
        if self._lock is not None:
            with disk_errors(self.aside):
                self._lock.remove_folder(_LAID)
                self._lock = None

    def unfinished(self) -> Path | None:
        """Return the unfinished work on this output, or the work that this folder is part of, or None.

        The remains of a merge that was killed after publishing its output do not count.
        """
        return _work_around(self._folder) or (self.aside if self.work.folder.exists() else None)

    def _exchange(self) -> None:
        replacing = self._folder.exists()
        if replacing:
            self._folder.rename(self._replaced)
        try:
            self.work.folder.rename(self._folder)
        except BaseException:
            if replacing:
                self._replaced.rename(self._folder)
            raise


def _partial_of(out: Path) -> Path:
    return out.with_name(f".{out.name}{_PARTIAL}")


def _work_around(folder: Path) -> Path | None:
    """Return the place of an output's work that a folder is, or in which it lies; None: there is none."""
    around = (folder, *folder.parents)
    return next((f for f in around if f.name.startswith(".") and f.name.endswith(_PARTIAL)), None)


def _resolve(out: Path) -> Path:
    try:
        resolved = local_path(out).resolve()
        if not resolved.name:
            raise InputError(
                f"the output {out} is the root of the file system: choose a folder in it"
            )
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(_partial_of(resolved))  # the longer of the two names
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error  # the text of an OSError repeats the name
        raise InputError(
            f"{str(out)!r} cannot be the name of an output ({why}): choose another"
        ) from error
    return resolved


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise InputError(f"{path} is a symbolic link, not ours: remove it")


def _refuse_strange(partial: Path) -> None:
    """Check that the place of the work holds covmerge's files only, because it is removed at the end."""
    try:
        entries = [(entry, entry.is_dir()) for entry in os.scandir(partial)]
    except (FileNotFoundError, NotADirectoryError):  # there is no such folder, or no longer
        return
    for entry, is_folder in entries:
        folder = _LAID.get(entry.name)
        wrong = folder is None or (folder != is_folder and not entry.is_symlink())
        # Another process that finishes its work may have removed a listed entry.
        if wrong and os.path.lexists(entry.path):
            raise InputError(
                f"{entry.path} is not covmerge's, and the work on an output would lie there: move it "
                "away, or choose another name for the output"
            )


def _walk(folder: Path) -> Iterator[Path]:
    """Yield every file and folder in `folder`, and the folder itself last."""
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            yield from _walk(child)
        else:
            yield child
    yield folder
