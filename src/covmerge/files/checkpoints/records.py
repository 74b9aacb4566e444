"""What the pickled files of a training's ranks have in common, once they are read as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.files.checkpoints.base import check_unchanged
from covmerge.files.checkpoints.laid import Laid
from covmerge.files.checkpoints.unpickler import Inert, Sealed
from covmerge.files.stores.store import Stamp, stamp_of


@dataclass(frozen=True)
class LaidPart:
    """A tensor in a pickled file of one rank, of which rows are read."""

    path: Path
    stamp: Stamp
    name: str
    laid: Laid

    def __call__(self, rows: range | None) -> Tensor:
        """Read some rows, all for None."""
        check_unchanged(self.path, self.stamp, stamp_of(self.path.stat()))
        found = self.laid.tensor(rows)
        if found.dtype is torch.bool and found.numel() and int(found.view(torch.uint8).max()) > 1:
            raise CheckpointError(
                f"{self.path}: '{self.name}' is of bool and holds bytes other than 0 and 1: save it again"
            )
        return found

    def within(self, start: int, stop: int) -> LaidPart:
        """Return a part of a flat one."""
        laid = replace(
            self.laid, offset=self.laid.offset + start * self.laid.strides[0], shape=(stop - start,)
        )
        return replace(self, laid=laid)


def attributes(value: object) -> Mapping[object, object]:
    """Return what a record keeps as its attributes, alone or beside those of its slots."""
    state = value.state if isinstance(value, Inert) else value
    for one in (state, *listed(state)):
        if isinstance(one, Mapping):
            return cast("Mapping[object, object]", one)
    return {}


def listed(value: object) -> Sequence[object]:
    """Return a list's or a tuple's items, of anything else none."""
    return cast("Sequence[object]", value) if isinstance(value, tuple | list) else ()


def numbers(value: object) -> tuple[int, ...] | None:
    """Return sizes, or None for anything else."""
    items = listed(value)
    fits = isinstance(value, tuple | list) and all(type(n) is int and 0 <= n < 2**62 for n in items)
    return tuple(cast("Sequence[int]", items)) if fits else None


def kind_of(value: object) -> str:
    """Return the name of a class, or of a value's class; its module changes with releases."""
    if isinstance(value, Sealed):
        return value.origin.rpartition(".")[2]
    return (
        type(value).origin.rpartition(".")[2] if isinstance(value, Inert) else type(value).__name__
    )
