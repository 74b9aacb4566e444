"""The output appears all at once: work goes on beside it, and one rename makes it visible.

    models/.merged.covmerge-partial/    while the merge runs, or after it was killed
        lock                            held by the process that works here
        journal.jsonl                   finished work; with it a merge can be resumed
        output/                         becomes models/merged
        replaced/                       what models/merged was, for the moment of the exchange

Only `output/` is ever renamed into place, so a finished output holds no trace of the work.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from covmerge.checkpoints.manifest import unknown_files
from covmerge.errors import InputError
from covmerge.stores.address import local_path
from covmerge.stores.disk import disk_errors, fsync_path
from covmerge.stores.lock import LOCK_NAME, Lock, TakenError

_PARTIAL = ".covmerge-partial"


class Staging:
    """The folder in which an output is made; a context manager.

    Leaving the context without `commit` keeps the work if its journal was begun, for `resume`,
    and removes it otherwise.

    Args:
        out: the output folder; symbolic links are resolved, so a link goes on to point to it.
        overwrite: replace an output of covmerge that is there and holds nothing else, and discard
            an unfinished merge unless `resume` is set too.
        resume: go on with an unfinished merge.

    Attributes:
        out: the resolved output folder.
        folder: where the files of the output are written until `commit`.
        journal: path of the journal.
        resuming: True if there is a journal to go on with; valid inside the context.
        notes: what the user should be told.

    Raises (on entering the context):
        InputError: the output exists or may not be replaced, another merge works on it, or an
            unfinished merge waits for a decision.

    Example:
        >>> from tempfile import mkdtemp
        >>> out = Path(mkdtemp()) / "merged"
        >>> with Staging(out) as staging:
        ...     _ = (staging.folder / "covmerge.json").write_text("{}")
        ...     staging.commit()
        >>> [path.name for path in out.iterdir()]
        ['covmerge.json']
    """

    def __init__(self, out: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.out = _resolve(out)
        self._partial = _partial_of(self.out)
        self._replaced = self._partial / "replaced"
        self.folder = self._partial / "output"
        self.journal = self._partial / "journal.jsonl"
        self.resuming = False
        self.notes: list[str] = []
        self._overwrite = overwrite
        self._resume = resume
        self._lock: Lock | None = None

    def check(self) -> None:
        """Refuse what entering the context refuses of the output itself; nothing is created.

        Raises:
            InputError: the output exists, or may not be replaced.
        """
        self._refuse_output()

    def __enter__(self) -> Staging:
        self._refuse_output()  # before anything is created
        if self._partial.is_symlink():
            raise InputError(f"{self._partial} is a symbolic link, not ours: remove it")
        with disk_errors(self._partial):
            self._lock = self._take_lock()
            try:
                self._restore_replaced()
                self._refuse_output()
                self._prepare()
            except BaseException:
                self._release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is None:
            return
        if self.journal.exists():
            self._release()
        else:
            self.discard()

    def commit(self) -> None:
        """Put the output on the disk and rename it into place.

        Raises:
            InputError: something appeared at the output meanwhile that may not be replaced. The
                work is kept: move that away, then resume.
        """
        self._refuse_output()
        with disk_errors(self.out):
            _fsync_tree(self.folder)
            self._exchange()
            fsync_path(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the work; the output is left as it is."""
        if self._lock is None:
            return
        with disk_errors(self._partial):
            self._lock.remove_folder()
            self._lock = None

    def _refuse_output(self) -> None:
        out = self.out
        try:
            empty = not any(out.iterdir())
            mounted = os.path.ismount(out)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            raise InputError(
                f"the output {out} exists and is no folder: choose another name"
            ) from None
        if mounted:
            raise InputError(
                f"the output {out} is a mount point, which cannot be replaced as a whole: "
                f"choose a folder inside it, such as {out / 'merged'}"
            )
        if not self._overwrite:
            raise InputError(
                f"the output {out} exists: pass --overwrite to replace it, or choose another name"
            )
        if not empty:
            self._refuse_strange_files()

    def _refuse_strange_files(self) -> None:
        """Let an output be replaced only if all that it holds is covmerge's."""
        before = _inode(self.out)
        try:
            strange = unknown_files(self.out)
        except (InputError, OSError) as error:
            if _inode(self.out) != before:
                return self._refuse_output()  # another merge exchanged it meanwhile
            raise InputError(
                f"the output {self.out} is not known for an output of covmerge, so it is not deleted "
                f"({error}): remove it yourself, or choose another name"
            ) from error
        if strange:
            raise InputError(
                f"the output {self.out} holds what covmerge did not write, so it is not deleted: "
                f"{', '.join(strange[:5])}{' and more' if strange[5:] else ''}. Move these away, or "
                "choose another name"
            )
        return None

    def _take_lock(self) -> Lock:
        try:
            lock = Lock(self._partial)
        except TakenError as error:
            raise InputError(
                f"another process is merging into {self.out}: wait for it, or choose another name"
            ) from error
        if not lock.works:
            self.notes.append(
                f"the file system of {self.out} has no locks: see to it yourself that no other "
                "merge writes there"
            )
        return lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _restore_replaced(self) -> None:
        """Undo an exchange that was killed after its first step."""
        if self._replaced.exists() and not os.path.lexists(self.out):
            self._replaced.rename(self.out)
            self.notes.append(f"{self.out} was put back: the merge replacing it was killed")

    def _prepare(self) -> None:
        # Without `output` the merge was finished, and killed while it cleaned up.
        unfinished = self.journal.exists() and self.folder.exists()
        if unfinished and not (self._resume or self._overwrite):
            raise InputError(
                f"an unfinished merge into {self.out} lies in {self._partial}: "
                "pass --resume to go on, --overwrite to start again"
            )
        if unfinished and self.folder.is_symlink():
            raise InputError(f"{self.folder} is a symbolic link, not ours: remove it")
        self.resuming = unfinished and self._resume
        if self.resuming:
            return
        if self._resume:
            self.notes.append(f"there is nothing to resume for {self.out}: started from the start")
        elif unfinished:
            self.notes.append(f"the unfinished merge in {self._partial} was discarded")
        _remove_children(self._partial, keep=LOCK_NAME)
        self.folder.mkdir()

    def _exchange(self) -> None:
        replacing = self.out.exists()
        if replacing:
            self.out.rename(self._replaced)
        try:
            self.folder.rename(self.out)
        except BaseException:
            if replacing:
                self._replaced.rename(self.out)
            raise


def find_unfinished(out: Path) -> Path | None:
    """Return the unfinished work on an output, or the one that a folder is part of; None if none."""
    target = _resolve(out)
    inside = (folder for folder in (target, *target.parents) if folder.name.endswith(_PARTIAL))
    return next((folder for folder in (*inside, _partial_of(target)) if folder.exists()), None)


def remove_others(folder: Path, keep: Collection[str]) -> list[str]:
    """Remove all that a folder being written holds but some regular files; return what that was.

    Args:
        folder: the folder; folders left empty in it are removed without a word.
        keep: the files, as paths in it.
    """
    removed: list[str] = []
    with disk_errors(folder):
        for path in list(_walk(folder))[:-1]:
            name = path.relative_to(folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif name not in keep or path.is_symlink() or not path.is_file():
                path.unlink()
                removed.append(name)
    return removed


def check_not_input(out: Path, inputs: Sequence[Path]) -> None:
    """Refuse an output that is an input, lies inside one, or would replace a folder holding one.

    Files are told apart by what they are, not by their paths: links and mounts are seen through.

    Args:
        out: the output folder; it need not exist.
        inputs: files and folders; those that do not exist are left to their reader to refuse.

    Raises:
        InputError: the message names both paths.
    """
    target = _resolve(out)
    for given in inputs:
        if not given.exists():
            continue
        # A linked input is lost with its link as well as with what the link points to.
        held = _lies_in(given.absolute(), target) or _lies_in(given.resolve(), target)
        if held or _lies_in(target, given):
            raise InputError(
                f"the output {out} and the input {given} overlap: choose an output elsewhere"
            )


def _partial_of(out: Path) -> Path:
    return out.with_name(f".{out.name}{_PARTIAL}")


def _lies_in(inner: Path, outer: Path) -> bool:
    """Whether `outer` is `inner` or one of the folders around it."""
    if not outer.exists():
        return False
    return any(path.exists() and path.samefile(outer) for path in (inner, *inner.parents))


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
        raise InputError(
            f"{str(out)!r} cannot be the name of an output ({error}): choose another"
        ) from error
    return resolved


def _inode(path: Path) -> tuple[int, int] | None:
    """Which file a path leads to, None for none: numbers of removed ones are given again."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def _remove_children(folder: Path, keep: str) -> None:
    for child in folder.iterdir():
        if child.name == keep:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _fsync_tree(folder: Path) -> None:
    for path in _walk(folder):
        fsync_path(path)


def _walk(folder: Path) -> Iterator[Path]:
    """Every file and folder in `folder`, and itself last."""
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            yield from _walk(child)
        else:
            yield child
    yield folder
