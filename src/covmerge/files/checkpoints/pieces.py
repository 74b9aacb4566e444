"""Tensors that lie in pieces: each process of a training saved its part of every tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import find_header
from covmerge.files.stores.store import StoredFile

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True)
class Piece:
    """A part of a tensor.

    Attributes:
        offsets: where it begins in the tensor.
        sizes: its shape.
        read: reads some of its rows, all for None.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[range | None], Tensor]


@dataclass(frozen=True)
class Pieced:
    """A tensor and its pieces.

    Attributes:
        header: of the whole tensor.
        pieces: parts of the tensor; of the flattened tensor, if `flat`.
        flat: whether the tensor was flattened before it was divided.
    """

    header: TensorHeader
    pieces: Sequence[Piece]
    flat: bool = False


class PiecedFiles:
    """The files of all processes of a training, as one file of weights.

    Args:
        where: what messages call them.
        files: all of them.
        tensors: in their order.
        note: what a reader of the report should know, if anything.

    Raises:
        CheckpointError: the pieces of a tensor are not side by side, or do not make it up.
    """

    settings: Mapping[str, Any] | None = None

    def __init__(
        self, where: str, files: Sequence[StoredFile], tensors: Sequence[Pieced], note: str
    ) -> None:
        self._where = where
        self._tensors = {tensor.header.name: tensor for tensor in tensors}
        self.files = tuple(files)
        self.notes = (note,) if note else ()
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: tensor.header for name, tensor in self._tensors.items()}
        )
        for tensor in tensors:
            header = tensor.header
            shape = (math.prod(header.shape),) if tensor.flat else header.shape
            if not tile([(piece.offsets, piece.sizes) for piece in tensor.pieces], shape):
                raise CheckpointError(
                    f"{where}: the {len(tensor.pieces)} pieces of '{header.name}' do not make up its shape "
                    f"{list(header.shape)}: a file is missing or of another checkpoint, fetch them again"
                )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        header = find_header(self.headers, name, rows, self._where)
        tensor = self._tensors[name]
        if not header.shape and not tensor.flat:
            return tensor.pieces[0].read(None)
        top = header.shape[0] if header.shape else 1
        taken = range(top) if rows is None else range(rows.start, max(rows.start, rows.stop))
        shape = (len(taken), *header.shape[1:]) if header.shape else ()
        found = torch.empty(shape, dtype=header.dtype)
        step = math.prod(header.shape[1:]) if tensor.flat else 1
        place = found.view(-1) if tensor.flat else found
        _put_together(place, tensor.pieces, range(taken.start * step, taken.stop * step))
        return found

    def close(self) -> None:
        """Nothing stays open between reads."""


def _put_together(found: Tensor, pieces: Sequence[Piece], taken: range) -> None:
    """Read the rows `taken` of a divided tensor."""
    for piece in pieces:
        top = piece.offsets[0]
        start, stop = max(taken.start, top), min(taken.stop, top + piece.sizes[0])
        if start < stop and 0 not in piece.sizes:
            found[box_of(piece.offsets, piece.sizes, start - taken.start, stop - taken.start)] = (
                piece.read(range(start - top, stop - top))
            )


def box_of(
    offsets: Sequence[int], sizes: Sequence[int], start: int, stop: int
) -> tuple[slice, ...]:
    """Return the place of a piece: the rows from start to stop, and all of it along other axes."""
    beyond = zip(offsets[1:], sizes[1:], strict=True)
    return (slice(start, stop), *(slice(first, first + count) for first, count in beyond))


def tile(boxes: Sequence[Box], shape: Sequence[int], axis: int = 0) -> bool:
    """Whether boxes fill a shape from an axis on, without gaps or overlaps, as sharding cuts it.

    Along each axis two boxes have the same interval or have nothing in common.
    """
    if math.prod(shape) == 0:
        return True
    boxes = [box for box in boxes if 0 not in box[1]]
    if axis == len(shape):
        return len(boxes) == 1
    intervals: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for offsets, sizes in boxes:
        intervals[offsets[axis], offsets[axis] + sizes[axis]].append((offsets, sizes))
    reached = 0
    for start, stop in sorted(intervals):
        if start != reached:
            return False
        reached = stop
    return reached == shape[axis] and all(
        tile(inner, shape, axis + 1) for inner in intervals.values()
    )
