"""What is checked of one file of an output while it is hashed, the same in every process."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.types import Json, Module, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.hashes import FileHashes
from covmerge.files.stores.store import Store
from covmerge.maths.linalg.stored import all_finite
from covmerge.run.verification.files import hashes_of

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Onlooker:
    """Checks tensors as they are read: which are not finite, and which are not the base's.

    Args:
        base: what they are compared with; None: nothing is.
        apart: names of tensors that are not compared.

    Attributes:
        not_finite: names of tensors that have NaN or Inf.
        changed: names of tensors that are not the base's.
        error: the base could not be read.
    """

    def __init__(self, base: Checkpoint | None, apart: Collection[str] = ()) -> None:
        self._base = base
        self._apart = apart
        self.not_finite: set[str] = set()
        self.changed: set[str] = set()
        self.error: InputError | None = None

    def inspect(self, header: TensorHeader, rows: range | None, block: Tensor) -> None:
        """Compare some rows of a tensor."""
        name = header.name
        if block.is_complex():
            block = torch.view_as_real(block)
        if not all_finite(block):
            self.not_finite.add(name)
        if self._base is None or name in self.changed or name in self._apart or self.error:
            return
        try:
            same = torch.equal(block, self._base.read(name, rows).to(block.dtype))
        except InputError as error:  # of the base, and not of what is checked
            self.error = error
            return
        if not same:
            self.changed.add(name)


@dataclass(frozen=True)
class WeightsCheck:
    """What is checked of a file of weights, by any process; see `engine.FileCheck`.

    Attributes:
        store: the output.
        compared: whether with the base.
        apart: tensors that are not compared.
        parts: of packed tensors, which are not numbers by themselves.
    """

    store: Store
    compared: bool
    apart: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()

    def __call__(self, base: Checkpoint, name: str) -> dict[str, Json]:
        """Read a file once, for its hashes and for what is in it."""
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
        """See `FileCheck`; where the output lies other ranks know."""
        return {
            "compared": self.compared,
            "apart": sorted(self.apart),
            "parts": sorted(self.parts),
        }

    @classmethod
    def from_json(cls, store: Store, data: Mapping[str, Any]) -> WeightsCheck:
        """The check that another rank describes."""
        return cls(store, data["compared"], frozenset(data["apart"]), frozenset(data["parts"]))


def _prefix(file: str) -> str:
    """What stands before the names of a file's tensors in the whole model."""
    folder = file.rpartition("/")[0]
    return Module(folder).prefix if folder else ""


def hashes_in(found: Json) -> FileHashes | str:
    """The hashes of a file in what was found in it, or what is wrong with it."""
    fields = cast("Mapping[str, Any]", found)
    if "problem" in fields:
        return cast("str", fields["problem"])
    return FileHashes(fields["sha256"], fields["tensors"])
