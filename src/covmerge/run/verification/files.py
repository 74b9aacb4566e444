"""Comparison of an output's files with the hashes in its manifest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.text import counted, some
from covmerge.base.types import Json, Module, TensorHeader
from covmerge.files.adapters.checkpoint import ADAPTER_CONFIG
from covmerge.files.checkpoints.base import CARD_NAME, Checkpoint
from covmerge.files.checkpoints.hashes import FileHashes, Look, hash_file
from covmerge.files.checkpoints.layout import HEADS_FOLDER, MASKS_FOLDER
from covmerge.files.checkpoints.manifest import ADDED_LATER, MANIFEST_NAME
from covmerge.files.stores.store import Store, tree
from covmerge.maths.linalg.stored import all_finite
from covmerge.run.export.companions import is_weights
from covmerge.run.verification.outcome import Check

# By file: its hashes, or the reason why it has none.
Found = Mapping[str, FileHashes | str]


def hashes_of(store: Store, name: str, inspect: Look | None = None) -> FileHashes | str:
    """Read a file of an output once, and return its hashes, or a text that says what is wrong with it."""
    try:
        return hash_file(store, name, inspect)
    except FileNotFoundError:
        return "is missing"
    except CheckpointError as error:
        return f"cannot be read ({error})"


def hash_files(store: Store, names: Iterable[str]) -> dict[str, FileHashes | str]:
    """Return by file of an output its hashes, or a text that says what is wrong with it."""
    return {name: hashes_of(store, name) for name in names}


def check_files(store: Store, manifest: Mapping[str, Any], found: Found) -> Check:
    """Check that the files of an output are those that the merge wrote.

    A model card that was edited or removed is named, and is no failure, as it is for people. Added files
    are named too; they are a failure if a loader could take them in place of the merge's.
    """
    recorded: Mapping[str, Mapping[str, Any]] | None = manifest.get("files")
    if recorded is None:
        return Check(
            "files",
            ok=True,
            detail="not checked: no hashes are recorded (an older covmerge wrote this output), so "
            "that changed bytes would not be found; merge again to have them",
            made=False,
        )
    wrong: list[str] = []
    said: list[str] = []
    edited = 0
    places = {HEADS_FOLDER, MASKS_FOLDER, *(_folder_of(n) for n in recorded if is_weights(n))} | {
        ""
    }
    for name, record in recorded.items():
        for problem in _problems(record, found[name]):
            if name != CARD_NAME:
                wrong.append(f"{name} {problem}")
            else:
                gone = isinstance(found[name], str)
                said.append(f"{name} {problem}" if gone else f"{name} was edited since")
                edited += 1
    for name in tree(store):
        if name not in recorded and name not in ADDED_LATER and name != MANIFEST_NAME:
            if _is_loaded(name, places):
                wrong.append(f"{name} is not of this merge, and could be loaded in its place")
            else:
                said.append(f"{name} was added since")
    if wrong:
        return Check("files", ok=False, detail=some(wrong, 5, between="; "))
    count = len(recorded) - edited
    good = f"all {count} files are as they were written"
    if edited:
        good = f"{counted(count, 'file')} of {len(recorded)} are as they were written"
    elif count == 1:
        good = "the one file is as it was written"
    detail = f"{good}; {some(said, 5, between='; ')}" if said else good
    return Check("files", ok=True, detail=detail, noted=bool(said))


def _problems(record: Mapping[str, Any], found: FileHashes | str) -> Iterator[str]:
    if isinstance(found, str):
        yield found
        return
    if found.sha256 == record["sha256"]:
        return
    wanted: Mapping[str, str] = record.get("tensors", {})
    changed = [n for n, digest in wanted.items() if found.tensors.get(n) != digest]
    if not wanted:
        yield "is not as it was written"
    elif not found.tensors:
        yield "is not as it was written: its header is damaged"
    elif changed:
        yield f"is not as it was written: {some(changed, 5, quoted=True)}"
    else:
        yield "is not as it was written: its header differs, its tensors do not"


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _is_loaded(name: str, places: Collection[str]) -> bool:
    """Return whether a loader may take a file for a part of the output; `places` are folders of weights."""
    file = name.rpartition("/")[2]
    return _folder_of(name) in places and (is_weights(file) or file == ADAPTER_CONFIG)


# Checks of one file of an output while it is hashed, the same in every process.

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Onlooker:
    """A check of tensors as they are read: which are not finite, and which differ from the base's.

    Args:
        base: the base to compare tensors with; None to compare none.
        apart: names of tensors that are not compared.

    Attributes:
        not_finite: names of tensors that have NaN or Inf.
        changed: names of tensors that differ from the base's.
        error: the error of reading the base, after which no tensor is compared; None without an error.
    """

    def __init__(self, base: Checkpoint | None, apart: Collection[str] = ()) -> None:
        self._base = base
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
        if self._base is None or name in self.changed or name in self._apart or self.error:
            return
        try:
            same = torch.equal(block, self._base.read(name, rows).to(block.dtype))
        except InputError as error:  # an error of the base, not of the file that is checked
            self.error = error
            return
        if not same:
            self.changed.add(name)


@dataclass(frozen=True)
class WeightsCheck:
    """The check of one file of weights, by any process; an `engine.FileCheck`.

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
        """Return the check as JSON for other ranks, which know the store; see `FileCheck`."""
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
