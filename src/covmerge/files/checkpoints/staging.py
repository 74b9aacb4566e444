"""An output that appears all at once: work is done aside, and one step makes the output visible.

`Destination` has the operations on the place of the output. This module decides when an output may
be created, replaced or resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import cast

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.manifest import unknown_files
from covmerge.files.checkpoints.trainer import refuse_as_step
from covmerge.files.stores.address import address_of, hub_address
from covmerge.files.stores.destination import Destination
from covmerge.files.stores.lock import TakenError
from covmerge.files.stores.remote_destination import RemoteDestination
from covmerge.files.stores.store import tree


class OutputTakenError(InputError):
    """Another process is making the output."""


class Staging:
    """An output in progress; a context manager.

    Leaving the context without `commit` keeps the work for `resume` if the journal was begun, and
    removes it otherwise.

    Args:
        out: the output folder, or another destination.
        overwrite: replace an existing output if covmerge wrote all its files, and discard an
            unfinished merge unless `resume` is set too.
        resume: continue an unfinished merge.

    Attributes:
        out: the destination of the output.
        store, folder: where the files of the output are written until `commit`.
        journal: the journal of the merge.
        resuming: True if there is a journal to continue; valid inside the context.
        notes: notes for the user.

    Raises (on entering the context):
        InputError: the output exists or may not be replaced, another merge works on it, or there is
            an unfinished merge and neither option is set.

    Example:
        >>> from tempfile import mkdtemp
        >>> out = Path(mkdtemp()) / "merged"
        >>> with Staging(out) as staging:
        ...     staging.store.put("covmerge.json", b"{}")
        ...     staging.commit()
        >>> [path.name for path in out.iterdir()]
        ['covmerge.json']
    """

    def __init__(
        self, out: Path | Destination, *, overwrite: bool = False, resume: bool = False
    ) -> None:
        self.out = destination_of(out)
        self.store = self.out.work
        self.folder = self.store.folder
        self.journal = self.out.journal
        self.resuming = False
        self.notes: list[str] = []
        self._overwrite = overwrite
        self._resume = resume

    def check(self) -> None:
        """Raise if the output exists and may not be replaced; nothing is created."""
        there = self.out.occupant()
        if there is None:
            return
        try:
            empty = next(tree(self.out.output), None) is None
            strange = [] if empty else unknown_files(self.out.output)
        except (InputError, OSError) as error:
            if self.out.occupant() != there:
                return self.check()  # another merge replaced the output meanwhile
            raise InputError(
                f"the output {self.out} is not known for an output of covmerge, so it is not deleted "
                f"({error}): remove it yourself, or choose another name"
            ) from error
        if not self._overwrite and self._resume and self.out.begun():
            raise InputError(
                f"the output {self.out} exists, and what was to replace it lies unfinished in "
                f"{self.out.aside}: pass {Hint('overwrite')} too to go on with that"
            )
        if not self._overwrite and self._resume:
            raise InputError(
                f"the output {self.out} exists, and a merge that ended is not resumed: take it as it is, "
                f"or pass {Hint('overwrite')} to merge anew"
            )
        if not self._overwrite:
            raise InputError(
                f"the output {self.out} exists: pass {Hint('overwrite')} to replace it, or choose "
                "another name"
            )
        if strange:
            raise InputError(
                f"the output {self.out} holds what covmerge did not write, so it is not deleted: "
                f"{', '.join(strange[:5])}{' and more' if strange[5:] else ''}. Move these away, or "
                "choose another name"
            )
        return None

    def foresee(self) -> None:
        """Raise if entering the context would raise now; nothing is created."""
        self.check()
        self._check_unfinished()

    def __enter__(self) -> Staging:
        self.check()  # before anything is created
        self._take()
        try:
            if self.out.recover():
                self.notes.append(f"{self.out} was put back: the merge replacing it was killed")
            self.check()
            self._prepare()
        except BaseException:
            self.out.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # Not after `publish`, even if Ctrl-C came before the end of `commit`.
            kept = self.out.begun()
        except InputError:
            kept = True  # a link lies where the files did: to be refused by whoever resumes
        if kept:
            self.out.release()
        else:
            self.out.discard()

    def commit(self) -> None:
        """Make the work the visible output.

        Raises:
            InputError: something that may not be replaced appeared at the output meanwhile. The
                work is kept: move that thing away, then resume.
        """
        self.check()
        self.out.publish()
        self.out.discard()

    def discard(self) -> None:
        """Remove the work; an existing output stays."""
        self.out.discard()

    def _take(self) -> None:
        try:
            locked = self.out.take()
        except TakenError as error:
            raise OutputTakenError(
                f"another process is merging into {self.out}: wait for it, or choose another name. Where "
                f"they are to share the work, start all of them with {Hint('executor', 'ranks')}"
            ) from error
        if not locked:
            self.notes.append(
                f"the file system of {self.out} has no locks: see to it yourself that no other "
                "merge writes there"
            )

    def _check_unfinished(self) -> bool:
        """Return whether there is an unfinished merge; raise if neither option says what to do with it."""
        unfinished = self.out.begun()
        if unfinished and not (self._resume or self._overwrite):
            raise InputError(
                f"an unfinished merge into {self.out} lies in {self.out.aside}: "
                f"pass {Hint('resume')} to go on, {Hint('overwrite')} to start again"
            )
        return unfinished

    def _prepare(self) -> None:
        unfinished = self._check_unfinished()
        self.resuming = unfinished and self._resume
        if self.resuming:
            return
        if self._resume:
            self.notes.append(f"there is nothing to resume for {self.out}: started from the start")
        elif unfinished:
            self.notes.append(f"the unfinished merge in {self.out.aside} was discarded")
        self.out.begin()


def output_path(out: object) -> Path:
    """Return the path of an output that a caller names.

    Raises:
        InputError: it is not the name of a folder.

    Example:
        >>> output_path("merged").name
        'merged'
    """
    named = isinstance(out, str | PathLike)
    given = cast("str | PathLike[str]", out)
    if not named or not str(given):
        raise InputError(f"the output is {out!r}: give the name of a folder")
    return Path(given)


def destination_of(out: Path | Destination) -> Destination:
    """Return the destination for a folder given by its path or address."""
    if not isinstance(out, Path):
        return out
    address = None if hub_address(out) else address_of(out)
    return Destination(out.expanduser()) if address is None else RemoteDestination(address)


def find_unfinished(out: Path) -> Path | None:
    """Return the unfinished work on an output, or the unfinished work that a folder is part of, or None."""
    return Destination(out).unfinished()


def remove_remains(out: Path) -> None:
    """Remove what a merge left that was killed after publishing its output; unfinished work stays."""
    destination = Destination(out)
    if not destination.aside.exists():
        return
    with suppress(TakenError, InputError):  # it is another's, and does no harm
        destination.take()
        if destination.begun():
            destination.release()
        else:
            destination.discard()


def check_not_input(out: Path | Destination, inputs: Sequence[Path]) -> None:
    """Raise if an output is an input, is inside one, or would replace a folder with an input.

    An input must not be in the work folder either, which is removed at the end. The output must not
    look like a checkpoint of a training run that is an input.

    Files are compared by identity, not by path, so that links and mounts are resolved. Inputs that do
    not exist are refused later, by their reader.

    Raises:
        InputError: the output and an input overlap; the message names both paths.
    """
    destination = destination_of(out)
    _check_addresses(str(destination), inputs)
    folder = destination.output.folder
    if folder is None:
        return
    target, aside = folder.resolve(), destination.aside
    for given in inputs:
        if not given.exists():
            continue
        # A linked input is lost if either its link or the link's target is replaced.
        held = _lies_in(given.absolute(), target) or _lies_in(given.resolve(), target)
        if held or _lies_in(target, given):
            raise InputError(
                f"the output {folder} and the input {given} overlap: choose an output elsewhere"
            )
        refuse_as_step(target, given)
        if _lies_in(given.absolute(), aside) or _lies_in(given.resolve(), aside):
            raise InputError(
                f"the input {given} lies in {aside}, where the work on the output {folder} would go on "
                "and be removed: they overlap, choose an output of another name"
            )


def _check_addresses(out: str, inputs: Sequence[Path]) -> None:
    if (address := address_of(out)) is None:
        return
    for given in inputs:
        if not hub_address(given) and (other := address_of(given)) and address.overlaps(other):
            raise InputError(
                f"the output {address} and the input {other} overlap: choose an output elsewhere"
            )


def _lies_in(inner: Path, outer: Path) -> bool:
    """Return whether `outer` is `inner` or a folder around it."""
    if not outer.exists():
        return False
    return any(path.exists() and path.samefile(outer) for path in (inner, *inner.parents))
