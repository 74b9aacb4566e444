"""Hashes of the sources, taken during the merge; covmerge.json records them."""

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

# The contents of each source that are hashed, by the source's key.
Contents = Mapping[str, Sequence[Content]]
# Hashes by the source's key and the content's name.
Hashes = Mapping[str, Mapping[str, str]]


class Hashing(Protocol):
    """A context manager that hashes the sources; hashing stops at the end of its block."""

    def __enter__(self) -> Hashing:
        """Begin to hash."""
        ...

    def __exit__(self, *_: object) -> None:
        """Stop hashing: a run that failed does not wait for hashes."""
        ...

    def follow(self, share: float) -> None:
        """Note the share of the sources that the last pass of the run has read."""
        ...

    def result(self) -> Hashes:
        """Wait for all hashes and return them."""
        ...


_THREADS = 32  # at most; each thread that hashes is woken whenever the reader advances


class InStep:
    """Hashes the sources in threads of this process, one thread a source, in step with the merge's reader.

    A thread reads the files itself, in their order, but never a larger share of a source than the
    merge has read. Files in the base's order are therefore in the page cache when they are hashed, even
    where the sources are larger than the memory. Some files in another order are read from the disk
    twice. With more than 32 sources, a thread hashes several, one after the other.
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
        """Hash the sources of one thread, paced as if they were a single source."""
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
    """Return the contents with bytes, each with its source's key; several processes share them to hash."""
    return [(key, content) for key, files in contents.items() for content in files if content.size]


def in_order(contents: Contents, found: Mapping[tuple[str, str], str]) -> Hashes:
    """Return the hashes of all sources in their order; hash here the contents that `found` lacks."""

    def taken(key: str, content: Content) -> str:
        known = found.get((key, content.name))
        return content.hash(at_once) if known is None else known

    return {key: {one.name: taken(key, one) for one in files} for key, files in contents.items()}


# The finished output is read once more, file by file: by this process, or by all processes of the merge.

_CORES = 4  # per file: two hash the file, the others inspect it and wait for the disk
_MOST = 8  # files at once: enough to use a fast disk fully


class FileCheck(Protocol):
    """The check of a file of the output; it can be pickled."""

    def __call__(self, base: Checkpoint, name: str, /) -> Json:
        """Read the file of a name, and return the findings.

        Raises:
            CovmergeError: the base cannot be read.
        """
        ...

    def check(self, name: str, found: Json, /) -> Json:
        """Check the findings of another process about a file, and return them as this process writes them.

        Raises:
            ValueError: they are not findings of this check.
        """
        ...

    def as_json(self) -> Json:
        """Return what another process needs to do the same check."""
        ...


# A function of the sizes of files by name, their check and the base; it returns the findings in file order.
ReadFiles = Callable[[Mapping[str, int], FileCheck, Checkpoint], Mapping[str, Json]]


def files_at_once(count: int, processes: int = 1) -> int:
    """Return how many files a process reads at once."""
    return max(1, min(count, _MOST, usable_cores() // _CORES // processes))


def read_files(sizes: Mapping[str, int], check: FileCheck, base: Checkpoint) -> dict[str, Json]:
    """Read all files in this process; see `ReadFiles`."""
    # Inspecting a file is faster than hashing it, and torch's threads would wait on the hashers' cores.
    with (
        torch_threads(None),
        ThreadPool(files_at_once(len(sizes)), "covmerge-verify", use_threads, (1,)) as pool,
    ):
        found = pool.map(partial(check, base), sizes)
        return dict(zip(sizes, found, strict=True))
