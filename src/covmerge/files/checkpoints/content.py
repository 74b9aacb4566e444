"""What covmerge.json has a hash of, piece by piece: most often the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Called before each block with the bytes of the piece that have been hashed; it may wait, or raise to stop.
Pace = Callable[[int], None]


@dataclass(frozen=True)
class Content:
    """A piece of a checkpoint that is hashed by itself.

    Attributes:
        name: of the file, or what else is hashed.
        size: bytes that are read for it; 0: next to none.
        hash: reads it, and returns the hash with its kind, such as `sha256:1f2e...`; what was opened
            and has changed since is a CheckpointError.
        early: it comes before the others: what lies beside the weights is small, and may change later
            without harm.
    """

    name: str
    size: int
    hash: Callable[[Pace], str]
    early: bool = False


def at_once(done: int) -> None:
    """Wait for nobody: a `Pace`."""
