"""Tensors in pieces: each process of a training saved its part of every tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, WeightFile, find_header
from covmerge.files.checkpoints.view import View
from covmerge.files.stores.store import StoredFile

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True)
class Piece:
    """A part of a tensor."""

    offsets: tuple[int, ...]  # where the part begins in the tensor
    sizes: tuple[int, ...]  # the shape of the part
    # Function that reads some of its rows, or all rows for None.
    read: Callable[[range | None], Tensor]


@dataclass(frozen=True)
class Pieced:
    """A tensor with its pieces."""

    header: TensorHeader  # of the whole tensor
    pieces: Sequence[Piece]  # parts of the tensor, or of the flattened tensor if `flat` is set
    flat: bool = False  # whether the tensor was flattened before it was divided


class PiecedFiles(WeightFile):
    """The files of all processes of a training, as one file of weights.

    Raises:
        CheckpointError: the pieces of a tensor overlap or leave gaps, or do not fill its shape.
    """

    def __init__(
        self, where: str, files: Sequence[StoredFile], tensors: Sequence[Pieced], note: str
    ) -> None:
        self._where = where
        self._tensors = {tensor.header.name: tensor for tensor in tensors}
        self.files = tuple(files)
        self.notes = (note,) if note else ()
        self.headers = MappingProxyType(
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


def _put_together(found: Tensor, pieces: Sequence[Piece], taken: range) -> None:
    """Read the rows `taken` of a tensor from its pieces."""
    for piece in pieces:
        top = piece.offsets[0]
        start, stop = max(taken.start, top), min(taken.stop, top + piece.sizes[0])
        if start < stop and 0 not in piece.sizes:
            beyond = zip(piece.offsets[1:], piece.sizes[1:], strict=True)
            inner = (slice(first, first + count) for first, count in beyond)
            rows = slice(start - taken.start, stop - taken.start)
            found[(rows, *inner)] = piece.read(range(start - top, stop - top))


def tile(boxes: Sequence[Box], shape: Sequence[int], axis: int = 0) -> bool:
    """Return whether boxes fill a shape from an axis on, without gaps or overlaps, as sharding does.

    Two boxes must have the same interval along an axis, or intervals without overlap.
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


# Tensors that are composed of stored tensors: joined, cut, transposed, or the weight of a weight norm.

Shape = tuple[int, ...]
Read = Callable[[str, range], Tensor]


class Assembly(ABC):
    """A description of how a tensor is made of stored tensors."""

    shape: Shape

    @abstractmethod
    def read(self, read: Read, rows: range) -> Tensor:
        """Return rows of the tensor."""

    @abstractmethod
    def stored(self) -> Iterable[str]:
        """Return the names of the stored tensors that it is made of."""

    def all(self, read: Read) -> Tensor:
        """Return the whole tensor."""
        return self.read(read, range(self.shape[0]))


@dataclass(frozen=True)
class StoredTensor(Assembly):
    """A stored tensor."""

    name: str
    shape: Shape

    def read(self, read: Read, rows: range) -> Tensor:
        return read(self.name, rows)

    def stored(self) -> Iterable[str]:
        return (self.name,)


@dataclass(frozen=True)
class Joined(Assembly):
    """Several tensors, joined along an axis."""

    parts: tuple[Assembly, ...]
    dim: int
    shape: Shape

    def read(self, read: Read, rows: range) -> Tensor:
        if self.dim:
            return torch.cat([part.read(read, rows) for part in self.parts], self.dim)
        found, start = list[Tensor](), 0
        for part in self.parts:
            first, last = (
                min(max(row - start, 0), part.shape[0]) for row in (rows.start, rows.stop)
            )
            if first < last or not found:
                found.append(part.read(read, range(first, last)))
            start += part.shape[0]
        return torch.cat(found)

    def stored(self) -> Iterable[str]:
        return (name for part in self.parts for name in part.stored())


@dataclass(frozen=True)
class _Of(Assembly):
    whole: Assembly
    shape: Shape

    def stored(self) -> Iterable[str]:
        return self.whole.stored()


@dataclass(frozen=True)
class Cut(_Of):
    """A range of a tensor along an axis."""

    dim: int
    start: int

    def read(self, read: Read, rows: range) -> Tensor:
        if self.dim:
            return self.whole.read(read, rows).narrow(self.dim, self.start, self.shape[self.dim])
        return self.whole.read(read, range(rows.start + self.start, rows.stop + self.start))


@dataclass(frozen=True)
class Alone(_Of):
    """A matrix as a stack of one matrix."""

    def read(self, read: Read, rows: range) -> Tensor:
        return self.whole.all(read)[None][rows.start : rows.stop]


@dataclass(frozen=True)
class Only(_Of):
    """The matrix in a stack of one matrix."""

    def read(self, read: Read, rows: range) -> Tensor:
        return self.whole.read(read, range(1))[0][rows.start : rows.stop]


@dataclass(frozen=True)
class Turned(_Of):
    """A tensor with two axes exchanged, after an optional split of one axis in two, (axis, size)."""

    split: tuple[int, int] | None
    dims: tuple[int, int]

    def read(self, read: Read, rows: range) -> Tensor:
        moves_rows = 0 in self.dims
        tensor = self.whole.all(read) if moves_rows else self.whole.read(read, rows)
        if self.split is None:
            tensor = tensor.transpose(*self.dims)
        else:
            dim, size = self.split
            shape = (*tensor.shape[:dim], -1, size, *tensor.shape[dim + 1 :])
            tensor = tensor.reshape(shape).transpose(*self.dims).flatten(*self.dims)
        return tensor[rows.start : rows.stop] if moves_rows else tensor


@dataclass(frozen=True)
class Normed(Assembly):
    """The weight of a weight norm: w = g · v / ‖v‖; the norm is over the axes in which g has length 1."""

    length: Assembly
    direction: Assembly
    shape: Shape

    def read(self, read: Read, rows: range) -> Tensor:
        by_rows = self.length.shape[0] == self.shape[0]  # otherwise norms are taken over rows too
        taken = rows if by_rows else range(self.shape[0])
        direction = self.direction.read(read, taken)
        v = direction.double()
        g = self.length.read(read, taken if by_rows else range(1)).double()
        axes = [axis for axis, size in enumerate(self.length.shape) if size == 1]  # at least one
        w = v * (g / v.square().sum(axes, keepdim=True).sqrt())
        return (w if by_rows else w[rows.start : rows.stop]).to(direction.dtype)

    def stored(self) -> Iterable[str]:
        return (*self.direction.stored(), *self.length.stored())


@dataclass(frozen=True)
class Masked(Assembly):
    """A pruned tensor, as torch.nn.utils.prune computes it: the mask times the values before it."""

    values: StoredTensor
    mask: StoredTensor
    shape: Shape

    def read(self, read: Read, rows: range) -> Tensor:
        values = self.values.read(read, rows)
        return values * self.mask.read(read, rows).to(values.dtype)

    def stored(self) -> Iterable[str]:
        return (self.values.name, self.mask.name)


def joined(parts: Sequence[Assembly], dim: int) -> Assembly:
    """Return parts joined like `torch.cat`; if they are all cuts of one tensor, return that tensor."""
    size = sum(part.shape[dim] for part in parts)
    first = parts[0]
    if isinstance(first, Cut) and first.whole.shape[dim] == size:
        start = 0
        for part in parts:
            if not (isinstance(part, Cut) and part.whole == first.whole and part.dim == dim):
                break
            if part.start != start:
                break
            start += part.shape[dim]
        else:
            return first.whole
    if len(parts) == 1:
        return first
    return Joined(tuple(parts), dim, (*first.shape[:dim], size, *first.shape[dim + 1 :]))


def cut(whole: Assembly, dim: int, start: int, stop: int) -> Assembly:
    """Return a range of a tensor along an axis; if it is one part of a joined tensor, return that part."""
    if (start, stop) == (0, whole.shape[dim]):
        return whole
    if isinstance(whole, Joined) and whole.dim == dim:
        at = 0
        for part in whole.parts:
            if (at, at + part.shape[dim]) == (start, stop):
                return part
            at += part.shape[dim]
    return Cut(whole, (*whole.shape[:dim], stop - start, *whole.shape[dim + 1 :]), dim, start)


def alone(matrix: Assembly) -> Assembly:
    """Return a matrix as a stack of one matrix."""
    return matrix.whole if isinstance(matrix, Only) else Alone(matrix, (1, *matrix.shape))


def only(stack: Assembly) -> Assembly:
    """Return the matrix in a stack of one matrix."""
    return stack.whole if isinstance(stack, Alone) else Only(stack, stack.shape[1:])


def transposed(whole: Assembly, one: int, other: int) -> Assembly:
    """Return a tensor with two axes exchanged."""
    if isinstance(whole, Turned) and whole.split is None and {*whole.dims} == {one, other}:
        return whole.whole
    shape = list(whole.shape)
    shape[one], shape[other] = shape[other], shape[one]
    return Turned(whole, tuple(shape), None, (one, other))


def interleaved(whole: Assembly, dim: int, *, back: bool) -> Assembly:
    """Return a tensor with the even rows of an axis first, then the odd ones; `back` is the reverse."""
    size = whole.shape[dim] // 2 if back else 2
    opposite = 2 if back else whole.shape[dim] // 2
    if isinstance(whole, Turned) and whole.split == (dim, opposite):
        return whole.whole
    return Turned(whole, whole.shape, (dim, size), (dim, dim + 1))


class Assembled(View):
    """A view in which some tensors are made of stored ones, which are not shown themselves."""

    def __init__(self, stored: Checkpoint, made: Mapping[str, Assembly], *notes: str) -> None:
        used = {name for assembly in made.values() for name in assembly.stored()}
        super().__init__(stored, {n: n for n in stored.headers if n not in used}, *notes)
        self._made = made
        self.headers = MappingProxyType(
            {**self.headers, **{name: _header(stored, name, made[name]) for name in made}}
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        assembly = self._made.get(name)
        if assembly is None:
            return super().read(name, rows)
        find_header(self.headers, name, rows, self.source)
        if isinstance(assembly, StoredTensor):
            return self._stored.read(assembly.name, rows)
        wanted = range(assembly.shape[0]) if rows is None else rows
        return assembly.read(self._stored.read, wanted).contiguous()


def _header(stored: Checkpoint, name: str, assembly: Assembly) -> TensorHeader:
    first = stored.headers[next(iter(assembly.stored()))]
    return replace(first, name=name, shape=assembly.shape)
