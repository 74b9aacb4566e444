"""Hashes of the sources, taken during the merge, and of the finished output; covmerge.json records them."""

from __future__ import annotations

import re
import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json, Module, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Content, at_once
from covmerge.files.checkpoints.hashes import FileHashes, Look, hash_file
from covmerge.files.stores.store import Store
from covmerge.maths.linalg.stored import all_finite
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

    def follow(self, share: float) -> None:
        """Note the share of the sources that the last pass of the run has read."""

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
_DIGEST = re.compile(r"[0-9a-f]{64}")


def hashes_of(store: Store, name: str, inspect: Look | None = None) -> FileHashes | str:
    """Read a file of an output once, and return its hashes, or a text that says what is wrong with it."""
    try:
        return hash_file(store, name, inspect)
    except FileNotFoundError:
        return "is missing"
    except CheckpointError as error:
        return f"cannot be read ({error})"


class Onlooker:
    """A check of tensors as they are read: which are not finite, and which differ from the base's.

    Without a base, no tensors are compared; those in `apart` never are.

    Attributes:
        not_finite: names of tensors that have NaN or Inf.
        changed: names of tensors that differ from the base's.
        error: the error of reading the base, after which no tensor is compared; None without an error.
    """

    def __init__(self, base: Checkpoint | None, apart: Collection[str] = ()) -> None:
        self.base = base
        self._apart = apart
        self.not_finite: set[str] = set()
        self.changed: set[str] = set()
        self.error: InputError | None = None

    def inspect(self, header: TensorHeader, rows: range | None, block: Tensor) -> None:
        """Check that some rows of a tensor are finite, and compare them with the base's."""
        name = header.name
        if block.is_complex():
            block = torch.view_as_real(block)
        if not all_finite(block):
            self.not_finite.add(name)
        if self.base is None or name in self.changed or name in self._apart or self.error:
            return
        try:
            same = torch.equal(block, self.base.read(name, rows).to(block.dtype))
        except InputError as error:  # an error of the base, not of the file that is checked
            self.error = error
            return
        if not same:
            self.changed.add(name)


@dataclass(frozen=True)
class WeightsCheck:
    """The check of one file of weights of a finished output, by any process of the merge.

    Attributes:
        store: the store of the output.
        compared: whether tensors are compared with the base's.
        apart: names of tensors that are not compared.
        parts: names of stored tensors that are parts of quantised ones, and no weights by themselves.
    """

    store: Store
    compared: bool
    apart: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()

    def __call__(self, base: Checkpoint, name: str) -> dict[str, Json]:
        """Read a file once; return its hashes, and names of tensors that are not finite or are changed."""
        onlooker = Onlooker(base if self.compared else None, self.apart)
        prefix = _prefix(name)

        def inspect(header: TensorHeader, rows: range | None, block: Tensor) -> None:
            if header.name not in self.parts:
                onlooker.inspect(replace(header, name=f"{prefix}{header.name}"), rows, block)

        found = hashes_of(self.store, name, inspect)
        if onlooker.error is not None:
            raise onlooker.error
        if isinstance(found, str):
            return {"problem": found}
        return {
            "sha256": found.sha256,
            "tensors": dict(found.tensors),
            "not_finite": sorted(onlooker.not_finite),
            "changed": sorted(onlooker.changed),
        }

    def check(self, name: str, found: Json) -> dict[str, Json]:
        """Check the findings of another process about a file, and return them as this process writes them.

        Raises:
            ValueError: they are not findings of this check.
        """
        fields = cast("Mapping[str, Any]", found if isinstance(found, dict) else {})
        if {*fields} == {"problem"} and isinstance(fields["problem"], str):
            return {"problem": fields["problem"]}
        if {*fields} == {"sha256", "tensors", "not_finite", "changed"}:
            hashes = [fields["sha256"], *dict(fields["tensors"]).values()]
            names = {*fields["not_finite"], *fields["changed"]}
            whole = {f"{_prefix(name)}{tensor}" for tensor in fields["tensors"]}
            if names <= whole and all(map(_DIGEST.fullmatch, hashes)):
                return {**fields}
        raise ValueError("it is nothing that is found in a file")

    def as_json(self) -> dict[str, Json]:
        """Return the check as JSON for other ranks, which know the store."""
        return {
            "compared": self.compared,
            "apart": sorted(self.apart),
            "parts": sorted(self.parts),
        }

    @classmethod
    def from_json(cls, store: Store, data: Mapping[str, Any]) -> WeightsCheck:
        """Return the check that another rank wrote as JSON."""
        return cls(store, data["compared"], frozenset(data["apart"]), frozenset(data["parts"]))


def _prefix(file: str) -> str:
    """Return the prefix that the names of a file's tensors have in the whole model."""
    folder = file.rpartition("/")[0]
    return Module(folder).prefix if folder else ""


def hashes_in(found: Json) -> FileHashes | str:
    """Return the hashes in a result of `WeightsCheck`, or its text on what is wrong with the file."""
    fields = cast("Mapping[str, Any]", found)
    if "problem" in fields:
        return cast("str", fields["problem"])
    return FileHashes(fields["sha256"], fields["tensors"])


# A function of the sizes of files by name, their check and the base; it returns the findings in file order.
ReadFiles = Callable[[Mapping[str, int], WeightsCheck, Checkpoint], Mapping[str, Json]]


def files_at_once(count: int, processes: int = 1) -> int:
    """Return how many files a process reads at once."""
    return max(1, min(count, _MOST, usable_cores() // _CORES // processes))


def read_files(sizes: Mapping[str, int], check: WeightsCheck, base: Checkpoint) -> dict[str, Json]:
    """Read all files in this process; see `ReadFiles`."""
    # Inspecting a file is faster than hashing it, and torch's threads would wait on the hashers' cores.
    with (
        torch_threads(None),
        ThreadPool(files_at_once(len(sizes)), "covmerge-verify", use_threads, (1,)) as pool,
    ):
        found = pool.map(partial(check, base), sizes)
        return dict(zip(sizes, found, strict=True))
