"""The finished output, read once more file by file: by this process, or by all that merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.run.engine.thread_count import usable_cores

_CORES = 4  # for each file: two hash it, and the others look at it and wait for the disk
_MOST = 8  # files at once: as much as a fast disk gives


class FileCheck(Protocol):
    """What is done with a file of the output; it pickles."""

    def __call__(self, base: Checkpoint, name: str, /) -> Json:
        """Read the file of a name, and return what was found.

        Raises:
            CovmergeError: the base cannot be read.
        """
        ...

    def check(self, name: str, found: Json, /) -> Json:
        """Return what another process has found in a file, as it is written here.

        Raises:
            ValueError: it is nothing that is found.
        """
        ...

    def as_json(self) -> Json:
        """What another process needs to know to do the same."""
        ...


# By the bytes of files, and what is done with each: what was found, in their order.
ReadFiles = Callable[[Mapping[str, int], FileCheck, Checkpoint], Mapping[str, Json]]


def files_at_once(count: int, processes: int = 1) -> int:
    """Return how many files a process reads at once.

    Args:
        count: of files.
        processes: that share its machine.
    """
    return max(1, min(count, _MOST, usable_cores() // _CORES // processes))


def read_files(sizes: Mapping[str, int], check: FileCheck, base: Checkpoint) -> dict[str, Json]:
    """Read all files in this process; see `ReadFiles`."""
    with ThreadPool(files_at_once(len(sizes)), "covmerge-verify") as pool:
        found = pool.map(partial(check, base), sizes)
        return dict(zip(sizes, found, strict=True))
