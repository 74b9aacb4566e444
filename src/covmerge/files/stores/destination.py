"""What a merge asks of the place where its output is to appear."""

from __future__ import annotations

from typing import Protocol

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
