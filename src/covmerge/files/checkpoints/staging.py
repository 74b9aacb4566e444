"""The output appears all at once: work goes on aside, and one step makes it visible.

What is asked of the place is a `Destination`; here is when an output may be made, replaced or gone on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import cast

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.manifest import unknown_files
from covmerge.files.checkpoints.trainer import refuse_as_step
from covmerge.files.stores.address import address_of, hub_address
from covmerge.files.stores.destination import Destination, LocalDestination
from covmerge.files.stores.lock import TakenError
from covmerge.files.stores.remote_destination import RemoteDestination
from covmerge.files.stores.store import WritableFile, WritableStore, tree


class OutputTakenError(InputError):
    """Another process is making the output."""


class Staging:
    """An output that is being made; a context manager.

    Leaving the context without `commit` keeps the work if its journal was begun, for `resume`,
    and removes it otherwise.

    Args:
        out: the output folder, or another destination.
        overwrite: replace an output of covmerge that is there and holds nothing else, and discard
            an unfinished merge unless `resume` is set too.
        resume: go on with an unfinished merge.

    Attributes:
        out: where the output appears.
        resuming: True if there is a journal to go on with; valid inside the context.
        notes: what the user should be told.

    Raises (on entering the context):
        InputError: the output exists or may not be replaced, another merge works on it, or an
            unfinished merge waits for a decision.

    Example:
        >>> from tempfile import mkdtemp
        >>> out = Path(mkdtemp()) / "merged"
        >>> with Staging(out) as staging:
        ...     WritableFile(staging.store, "covmerge.json").put(b"{}")
        ...     staging.commit()
        >>> [path.name for path in out.iterdir()]
        ['covmerge.json']
    """

    def __init__(
        self, out: Path | Destination, *, overwrite: bool = False, resume: bool = False
    ) -> None:
        self.out = destination_of(out)
        self.resuming = False
        self.notes: list[str] = []
        self._overwrite = overwrite
        self._resume = resume

    @property
    def store(self) -> WritableStore:
        """Where the files of the output are written until `commit`."""
        return self.out.work

    @property
    def folder(self) -> Path | None:
        """The same as a folder of this machine, if it is one."""
        return self.store.folder

    @property
    def journal(self) -> WritableFile:
        """The journal."""
        return self.out.journal

    def check(self) -> None:
        """Refuse what entering the context refuses of the output itself; nothing is created."""
        there = self.out.occupant()
        if there is None:
            return
        try:
            empty = next(tree(self.out.output), None) is None
            strange = [] if empty else unknown_files(self.out.output)
        except (InputError, OSError) as error:
            if self.out.occupant() != there:
                return self.check()  # another merge exchanged it meanwhile
            raise InputError(
                f"the output {self.out} is not known for an output of covmerge, so it is not deleted "
                f"({error}): remove it yourself, or choose another name"
            ) from error
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
        """Refuse what entering the context would refuse now; nothing is created."""
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
        if self.journal.exists():
            self.out.release()
        else:
            self.out.discard()

    def commit(self) -> None:
        """Make the work the output.

        Raises:
            InputError: something appeared at the output meanwhile that may not be replaced. The
                work is kept: move that away, then resume.
        """
        self.check()
        self.out.publish()
        self.out.discard()

    def discard(self) -> None:
        """Remove the work; the output is left as it is."""
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
        """Return whether there is an unfinished merge; refuse to decide what becomes of it."""
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
    """Return an output that a caller names as a path.

    Raises:
        InputError: it is no name of a folder.

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
    """Return a folder that is given by its path or its address as a destination."""
    if not isinstance(out, Path):
        return out
    address = None if hub_address(out) else address_of(out)
    return LocalDestination(out.expanduser()) if address is None else RemoteDestination(address)


def find_unfinished(out: Path) -> Path | None:
    """Return the unfinished work on an output, or the one that a folder is part of; None if none."""
    return LocalDestination(out).unfinished()


def check_not_input(out: Path | Destination, inputs: Sequence[Path]) -> None:
    """Refuse an output that is an input, lies inside one, or would replace a folder holding one.

    Nor may an input lie where the work goes on, which is removed at its end, or be one of the checkpoints
    of a training run that the output would be taken for one of.

    Files are told apart by what they are, not by their paths: links and mounts are seen through.

    Args:
        out: the output folder; it need not exist. Another destination has no input of this machine in it.
        inputs: files, folders and addresses; those that do not exist are left to their reader to refuse.

    Raises:
        InputError: the message names both paths.
    """
    destination = destination_of(out)
    _check_addresses(str(destination), inputs)
    folder = destination.output.folder
    if folder is None:
        return
    target, aside = folder.resolve(), Path(destination.aside)
    for given in inputs:
        if not given.exists():
            continue
        # A linked input is lost with its link as well as with what the link points to.
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
    """Whether `outer` is `inner` or one of the folders around it."""
    if not outer.exists():
        return False
    return any(path.exists() and path.samefile(outer) for path in (inner, *inner.parents))
