"""What a merge asks of the place where its output is to appear."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from covmerge.base.errors import InputError
from covmerge.files.stores.address import local_path
from covmerge.files.stores.disk import disk_errors, fsync_path
from covmerge.files.stores.local import LocalFolder, unfinished_name
from covmerge.files.stores.lock import REMOVED, Lock
from covmerge.files.stores.store import Store, WritableFile, WritableStore


class Destination(Protocol):
    """Where one output appears, all at once, and where the work on it lies until then.

    One process at a time has it, from `take` to `release` or `discard`. `str` names it in messages. The
    caller decides when it may be written to, replaced or gone on with (`files/checkpoints/staging.py`).

    What cannot be done is an InputError, and what there is no room for a ResourceError.
    """

    @property
    def output(self) -> Store:
        """What is there, or will be."""
        ...

    @property
    def work(self) -> WritableStore:
        """The files that become the output."""
        ...

    @property
    def journal(self) -> WritableFile:
        """What says of the work how far it is."""
        ...

    @property
    def aside(self) -> str:
        """What messages call the place of the work."""
        ...

    def share(self) -> None:
        """Have processes of other machines work on it too.

        Raises:
            InputError: the work would lie where other machines do not see it.
        """
        ...

    def is_made_here(self) -> bool:
        """Whether what is there was made where this one's work lies: asked where it is shared."""
        ...

    def occupant(self) -> object | None:
        """What is there now: equal to itself until something else takes its place; None: nothing.

        Raises:
            InputError: something that can never be replaced by an output.
        """
        ...

    def take(self) -> bool:
        """Lock it, until the process ends at most; False: there are no locks here, and it is not locked.

        Raises:
            TakenError: another has it.
        """
        ...

    def recover(self) -> bool:
        """Undo a `publish` that was killed half way; True: an output was put back."""
        ...

    def begun(self) -> bool:
        """Whether there is work that can be gone on with: a journal, and what it speaks of."""
        ...

    def begin(self) -> None:
        """Remove whatever work there is, and begin anew."""
        ...

    def publish(self) -> None:
        """Make the work the output in one step, in the place of what is there; it survives a loss of power.

        A reader meanwhile finds the old output, the new one or none, and never a part. Where nothing
        is replaced in one step, covmerge.json comes last: without it nothing is taken for an output.
        """
        ...

    def release(self) -> None:
        """Let another have it; the work is kept."""
        ...

    def discard(self) -> None:
        """Remove the work, and let another have it; nothing where it is not taken."""
        ...


# A folder of this machine as a destination: work goes on beside it, and one rename makes it visible.
#
#     models/.merged.covmerge-partial/    while the merge runs, or after it was killed
#         lock                            held by the process that works here
#         journal.jsonl                   finished work; with it a merge can be resumed
#         output/                         becomes models/merged
#         replaced/                       what models/merged was, for the moment of the exchange
#         ranks/                          who does what, where several processes share the work
#         removed/                        one of these folders, while it is removed
#
# Only `output/` is ever renamed into place, so a finished output holds no trace of the work. What else lies
# there is somebody's, and is never removed.

_PARTIAL = ".covmerge-partial"
_JOURNAL = "journal.jsonl"
_LAID = {  # is it a folder?
    "lock": False,
    _JOURNAL: False,
    unfinished_name(_JOURNAL): False,
    "output": True,
    "replaced": True,
    "ranks": True,
    REMOVED: True,
}


class LocalDestination:
    """A folder that an output becomes; see `Destination`.

    Args:
        out: the folder; symbolic links are resolved, so a link goes on to point to it.
    """

    def __init__(self, out: Path) -> None:
        self.folder = _resolve(out)
        self._partial = _partial_of(self.folder)
        self._replaced = self._partial / "replaced"
        self.output = LocalFolder(out)
        self.work = LocalFolder(self._partial / "output")
        self.journal = WritableFile(LocalFolder(self._partial), _JOURNAL)
        self._lock: Lock | None = None

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def aside(self) -> str:
        return str(self._partial)

    def share(self) -> None:
        """See `Destination.share`: the work lies beside the output, and others see it there."""

    def is_made_here(self) -> bool:
        """See `Destination.is_made_here`: nothing gets here but from beside it."""
        return True

    def occupant(self) -> object | None:
        """See `Destination.occupant`: which file it is, as numbers of removed ones are given again."""
        if (around := _work_around(self.folder)) is not None:
            raise InputError(
                f"the output {self} has the place of the work on another one ({around}), which is removed "
                "when that is finished: choose another name"
            )
        try:
            status = self.folder.stat()
        except FileNotFoundError:
            return None
        except NotADirectoryError:  # of a folder that it would lie in
            status = None
        if status is None or not stat.S_ISDIR(status.st_mode):
            raise InputError(f"the output {self} exists and is no folder: choose another name")
        if os.path.ismount(self.folder):
            raise InputError(
                f"the output {self} is a mount point, which cannot be replaced as a whole: "
                f"choose a folder inside it, such as {self.folder / 'merged'}"
            )
        return status.st_ino, status.st_ctime_ns

    def take(self) -> bool:
        _refuse_link(self._partial)
        with disk_errors(self._partial):
            _refuse_strange(self._partial)
            self._lock = Lock(self._partial)
        return self._lock.works

    def recover(self) -> bool:
        if not self._replaced.exists() or os.path.lexists(self.folder):
            return False
        with disk_errors(self._partial):
            self._replaced.rename(self.folder)
        return True

    def begun(self) -> bool:
        """See `Destination.begun`: without `output/` it was published, and killed while it cleaned up."""
        if not (self.journal.exists() and self.work.folder.exists()):
            return False
        _refuse_link(self.work.folder)
        return True

    def begin(self) -> None:
        assert self._lock is not None, "take it first"
        with disk_errors(self._partial):
            self._lock.clear_folder(_LAID)
            self.work.folder.mkdir()

    def publish(self) -> None:
        with disk_errors(self.folder):
            for path in _walk(self.work.folder):
                fsync_path(path)
            self._exchange()
            fsync_path(self.folder.parent)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        if self._lock is not None:
            with disk_errors(self._partial):
                self._lock.remove_folder(_LAID)
                self._lock = None

    def unfinished(self) -> Path | None:
        """The work on this output, or the one that this folder is part of; None: there is none.

        What a merge leaves that was killed after its output was published is none.
        """
        partial = self._partial if self.work.folder.exists() else None
        return _work_around(self.folder) or partial

    def _exchange(self) -> None:
        replacing = self.folder.exists()
        if replacing:
            self.folder.rename(self._replaced)
        try:
            self.work.folder.rename(self.folder)
        except BaseException:
            if replacing:
                self._replaced.rename(self.folder)
            raise


def _partial_of(out: Path) -> Path:
    return out.with_name(f".{out.name}{_PARTIAL}")


def _work_around(folder: Path) -> Path | None:
    """The place of some output's work that a folder is, or lies in."""
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
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a NUL in it
        why = getattr(error, "strerror", None) or error  # a whole OSError repeats the name
        raise InputError(
            f"{str(out)!r} cannot be the name of an output ({why}): choose another"
        ) from error
    return resolved


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise InputError(f"{path} is a symbolic link, not ours: remove it")


def _refuse_strange(partial: Path) -> None:
    """Refuse what lies at the place of the work and is none, as the work's end removes it."""
    try:
        entries = [(entry, entry.is_dir()) for entry in os.scandir(partial)]
    except (FileNotFoundError, NotADirectoryError):  # there is none, or no longer
        return
    for entry, is_folder in entries:
        folder = _LAID.get(entry.name)
        wrong = folder is None or (folder != is_folder and not entry.is_symlink())
        # Another process, which ends its work, may remove what was listed.
        if wrong and os.path.lexists(entry.path):
            raise InputError(
                f"{entry.path} is not covmerge's, and the work on an output would lie there: move it "
                "away, or choose another name for the output"
            )


def _walk(folder: Path) -> Iterator[Path]:
    """Every file and folder in `folder`, and itself last."""
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            yield from _walk(child)
        else:
            yield child
    yield folder
