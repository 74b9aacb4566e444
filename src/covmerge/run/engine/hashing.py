"""The hashes of the sources, which covmerge.json records, taken while these are merged."""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Protocol

from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint, Content, at_once
from covmerge.run.engine.thread_count import torch_threads, usable_cores, use_threads

# What is hashed of each source, by its key.
Contents = Mapping[str, Sequence[Content]]
# Hashes by source and name.
Hashes = Mapping[str, Mapping[str, str]]


class Hashing(Protocol):
    """Hashes of the sources that are being taken; a context manager, at whose end that stops."""

    def __enter__(self) -> Hashing:
        """Begin."""
        ...

    def __exit__(self, *_: object) -> None:
        """Stop: a run that failed does not wait for hashes."""
        ...

    def follow(self, share: float) -> None:
        """Note that so much of the sources has been read by the last pass."""
        ...

    def result(self) -> Hashes:
        """Wait for the hashes."""
        ...


_THREADS = 32  # that hash; each is woken whenever the reader got on


class InStep:
    """Hashes taken by this process, a source each in a thread, in step with the reader of the merge.

    It reads the files for itself, in their order, but never a larger share of a source than the
    merge has read. Files in the base's order are then in the page cache when their turn comes, also
    where the sources are larger than the memory; of another order, some are read from the disk twice.
    Where sources are many, a thread has several, one after the other.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._changed = threading.Condition()
        self._share = 0.0
        self._stopped = False
        self._lanes = max(1, min(len(contents), _THREADS))
        self._pool = ThreadPool(self._lanes, "covmerge-hash")

    def __enter__(self) -> InStep:
        keys = list(self._contents)
        try:
            self._hashing = [
                self._pool.submit(self._hash, keys[lane :: self._lanes])
                for lane in range(self._lanes)
            ]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._pool.shutdown()

    def follow(self, share: float) -> None:
        with self._changed:
            self._share = share
            self._changed.notify_all()

    def result(self) -> Hashes:
        self.follow(1.0)
        return in_order(self._contents, dict(ChainMap(*(lane.result() for lane in self._hashing))))

    def _hash(self, keys: Sequence[str]) -> dict[tuple[str, str], str]:
        """Hash the sources of one thread, as if they were one."""
        contents = [(key, content) for key in keys for content in self._contents[key]]
        total, before = sum(content.size for _, content in contents), 0
        found: dict[tuple[str, str], str] = {}

        def pace(done: int) -> None:
            self._wait(min(1.0, (before + done) / total) if total else 1.0)

        for key, content in sorted(contents, key=lambda pair: not pair[1].early):
            found[key, content.name] = content.hash(pace)
            before += content.size
        return found

    def _wait(self, share: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or share <= self._share)
            if self._stopped:
                raise CancelledError("hashing the sources was stopped")

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def to_share(contents: Contents) -> list[tuple[str, Content]]:
    """Return what is worth being hashed by several processes: what is read, with the key of its source."""
    return [(key, content) for key, files in contents.items() for content in files if content.size]


def in_order(contents: Contents, found: Mapping[tuple[str, str], str]) -> Hashes:
    """Return the hashes of all sources in their order; what nobody found yet is hashed here."""

    def taken(key: str, content: Content) -> str:
        known = found.get((key, content.name))
        return content.hash(at_once) if known is None else known

    return {key: {one.name: taken(key, one) for one in files} for key, files in contents.items()}


# The finished output, read once more file by file: by this process, or by all that merged.

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
    """Return how many files a process reads at once."""
    return max(1, min(count, _MOST, usable_cores() // _CORES // processes))


def read_files(sizes: Mapping[str, int], check: FileCheck, base: Checkpoint) -> dict[str, Json]:
    """Read all files in this process; see `ReadFiles`."""
    # To look a file over takes less than its hashes, on whose cores threads of torch would wait.
    with (
        torch_threads(None),
        ThreadPool(files_at_once(len(sizes)), "covmerge-verify", use_threads, (1,)) as pool,
    ):
        found = pool.map(partial(check, base), sizes)
        return dict(zip(sizes, found, strict=True))
