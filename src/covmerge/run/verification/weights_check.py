"""What is seen of one file of an output while it is hashed: wherever that is done, the same."""

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
    """Sees tensors go by: which are not finite, and which are not the base's.

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

    def look(self, header: TensorHeader, rows: range | None, block: Tensor) -> None:
        """See some rows of a tensor."""
        name = header.name
        if block.is_complex():
            block = torch.view_as_real(block)
        if not all_finite(block):
            self.not_finite.add(name)
        if self._base is None or name in self.changed or name in self._apart or self.error:
            return
        try:
            same = torch.equal(block, self._base.read(name, rows).to(block.dtype))
        except InputError as error:  # of the base, and not of what is being looked at
            self.error = error
            return
        if not same:
            self.changed.add(name)


@dataclass(frozen=True)
class WeightsCheck:
    """What is looked for in a file of weights, by any process; see `engine.FileCheck`.

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
        seen = Onlooker(base if self.compared else None, self.apart)
        prefix = _prefix(name)

        def look(header: TensorHeader, rows: range | None, block: Tensor) -> None:
            if header.name not in self.parts:
                seen.look(replace(header, name=f"{prefix}{header.name}"), rows, block)

        found = hashes_of(self.store, name, look)
        if seen.error is not None:
            raise seen.error
        if isinstance(found, str):
            return {"problem": found}
        return {
            "sha256": found.sha256,
            "tensors": dict(found.tensors),
            "not_finite": sorted(seen.not_finite),
            "changed": sorted(seen.changed),
        }

    def check(self, name: str, found: Json) -> dict[str, Json]:
        own = cast("Mapping[str, Any]", found if isinstance(found, dict) else {})
        if {*own} == {"problem"} and isinstance(own["problem"], str):
            return {"problem": own["problem"]}
        if {*own} == {"sha256", "tensors", "not_finite", "changed"}:
            hashes = [own["sha256"], *dict(own["tensors"]).values()]
            names = {*own["not_finite"], *own["changed"]}
            whole = {f"{_prefix(name)}{tensor}" for tensor in own["tensors"]}
            if names <= whole and all(map(_DIGEST.fullmatch, hashes)):
                return {**own}
        raise ValueError("it is nothing that is found in a file")

    def as_json(self) -> dict[str, Json]:
        """See `FileCheck`; where the output lies other ranks know."""
        return {
            "compared": self.compared,
            "apart": sorted(self.apart),
            "parts": sorted(self.parts),
        }

    @classmethod
    def from_json(cls, store: Store, told: Mapping[str, Any]) -> WeightsCheck:
        """What another rank says is looked for in the output."""
        return cls(store, told["compared"], frozenset(told["apart"]), frozenset(told["parts"]))


def _prefix(file: str) -> str:
    """What stands before the names of a file's tensors in the whole model."""
    folder = file.rpartition("/")[0]
    return Module(folder).prefix if folder else ""


def hashes_in(found: Json) -> FileHashes | str:
    """The hashes of a file in what was found in it, or what is wrong with it."""
    own = cast("Mapping[str, Any]", found)
    if "problem" in own:
        return cast("str", own["problem"])
    return FileHashes(own["sha256"], own["tensors"])
