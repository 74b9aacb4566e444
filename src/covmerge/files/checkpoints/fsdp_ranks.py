"""Files of FSDP's ranks, as saved by verl and others: `model_world_size_4_rank_0.pt` and so on.

Each file is a state dict of DTensors, or of FSDP1's ShardedTensors, read as records (`unpickler.py`), so
that no class in it is created and no function called. A ShardedTensor has shards and their places.
A DTensor has its local part, the coordinates of its rank in the mesh, and for each axis of the mesh
Replicate(), Shard(dim), or _StridedShard(dim, split_factor): the latter says that another axis, usually
tensor parallelism, has divided the tensor first (FSDP2).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted
from covmerge.base.threads import ThreadPool
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import tensor_name
from covmerge.files.checkpoints.distributed import DTYPES
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.checkpoints.layout import MAX_TENSORS
from covmerge.files.checkpoints.pickled import load_records
from covmerge.files.checkpoints.pieces import Piece, Pieced, PiecedFiles
from covmerge.files.checkpoints.unpickler import (
    Inert,
    Laid,
    LaidPart,
    attributes,
    kind_of,
    listed,
    numbers,
    origin_of,
)
from covmerge.files.stores.store import Store, StoredFile, child

RANKS = re.compile(
    r"model_world_size_(?P<world>[0-9]{1,6})_rank_(?P<rank>[0-9]{1,6})\.pt", re.ASCII
)
_NEXT = (
    "gather the model where it was trained (verl: python -m verl.model_merger merge), and pass that"
)
_AT_ONCE = 4


@dataclass(frozen=True)
class _Shard:
    """How an axis of the mesh divides a tensor's: first into `factor` parts, and then each of these."""

    dim: int
    factor: int = 1


@dataclass(frozen=True)
class _Part:
    """One rank's part of a tensor."""

    header: TensorHeader  # of the whole tensor
    # Its numbers, by where they begin: a plain tensor, or shards. A DTensor has one local part, by ().
    held: Mapping[tuple[int, ...], LaidPart]
    place: tuple[int, ...] = ()  # of a DTensor: coordinates of the rank in the mesh
    shards: tuple[_Shard | None, ...] = ()  # along each of its axes; None: replicated
    order: tuple[int, ...] = ()  # in which these axes divide the tensor


@dataclass(frozen=True)
class _Copies:
    """A tensor that every rank has completely; it raises if the copies differ."""

    sources: Sequence[LaidPart]

    def __call__(self, rows: range | None) -> Tensor:
        first, *others = (source(rows) for source in self.sources)
        for source, other in zip(self.sources[1:], others, strict=True):
            if not torch.equal(_bytes(first), _bytes(other)):
                raise CheckpointError(
                    f"{source.file} has other values of '{source.name}' than {self.sources[0].file}, "
                    f"and both are copies: which are the model's is not known, {_NEXT}"
                )
        return first


def open_ranks(store: Store, names: Collection[str]) -> PiecedFiles | None:
    """Open a folder with files of FSDP's ranks, or return None if it has none."""
    matches = [match for name in names if (match := RANKS.fullmatch(name))]
    if not matches:
        return None
    where = str(store)
    worlds = {int(match["world"]) for match in matches}
    held = {int(match["rank"]): match.string for match in matches}
    world = max(worlds)
    if len(worlds) > 1:
        raise CheckpointError(
            f"{where} has files of {' and of '.join(map(str, sorted(worlds)))} ranks: they are of "
            "different checkpoints, move one of these to another folder"
        )
    if len(held) != len(matches) or set(held) != set(range(world)):
        missing = min(set(range(world)) - set(held), default=world)
        raise CheckpointError(
            f"{where} has {counted(len(held), 'file')} of {world} ranks, and none of rank {missing}: fetch "
            "the missing files, every rank has a part of the model"
        )
    files = [child(store, held[rank]) for rank in range(world)]
    with ThreadPool(_AT_ONCE) as pool:
        states = list(pool.map(_parts, files))
    for file, state in zip(files, states, strict=True):
        if state.keys() != states[0].keys():
            other = min(state.keys() ^ states[0].keys())
            raise CheckpointError(
                f"{file} and {files[0]} have not the same tensors, such as '{other}': they are of "
                "different checkpoints, fetch them again"
            )
    tensors = [_joined([state[name] for state in states], files, where) for name in states[0]]
    note = f"{where}: the tensors of {counted(world, 'rank')} of FSDP were put together"
    return PiecedFiles(where, files, tensors, note)


def _joined(parts: Sequence[_Part], files: Sequence[StoredFile], where: str) -> Pieced:
    """Return one tensor, composed of each rank's part."""
    first = parts[0]
    where = f"{where}: tensor '{first.header.name}'"
    for part, file in zip(parts, files, strict=True):
        own, others = ((p.header, len(p.place), p.shards, p.order) for p in (part, first))
        if own != others:
            raise CheckpointError(
                f"{where} has another shape, dtype or sharding in {file.name} than in "
                f"{files[0].name}: the files are of different checkpoints, fetch them again"
            )
    mesh = [max(axis) + 1 for axis in zip(*(part.place for part in parts), strict=True)]
    held: dict[tuple[tuple[int, ...], tuple[int, ...]], list[LaidPart]] = defaultdict(list)
    for part in parts:
        for offsets, source in part.held.items():
            if not part.place:
                held[offsets, source.laid.shape].append(source)
                continue
            runs = _runs(part, mesh, len(parts), where)
            local = tuple(sum(map(len, axis)) for axis in runs)
            if local != source.laid.shape:
                raise CheckpointError(
                    f"{where} of shape {list(part.header.shape)} has the local shape "
                    f"{list(source.laid.shape)} in {source.file.name}, where its sharding gives "
                    f"{list(local)}: {_NEXT}"
                )
            for begin, sizes, starts in _boxes(runs):
                held[begin, sizes].append(source.within(starts, sizes))
    # Ranks along a replicated axis have copies of the same part, and all have copies of a plain tensor.
    return Pieced(
        first.header,
        [Piece(*box, same[0] if len(same) == 1 else _Copies(same)) for box, same in held.items()],
    )


def _runs(part: _Part, mesh: Sequence[int], ranks: int, where: str) -> list[list[range]]:
    """Return the places along each axis of a tensor that a rank has."""
    runs = [[range(size)] for size in part.header.shape]
    for axis in part.order:
        shard = part.shards[axis]
        if shard is not None:
            factor = min(shard.factor, ranks + 1)
            runs[shard.dim] = _share(runs[shard.dim], part.place[axis], mesh[axis], factor)
        if prod(max(1, len(one)) for one in runs) > ranks:
            raise CheckpointError(
                f"{where} of shape {list(part.header.shape)} would be in more pieces than there are ranks "
                f"({ranks}): {_NEXT}"
            )
    return runs


def _share(runs: Sequence[range], place: int, count: int, factor: int) -> list[range]:
    """Return one of `count` shares of some places: of each of `factor` parts, the same chunk.

    Example:
        >>> _share([range(8)], 1, 2, 1), _share([range(8)], 1, 2, 2)
        ([range(4, 8)], [range(2, 4), range(6, 8)])
    """
    found: list[range] = []
    places = range(sum(map(len, runs)))
    for number in range(factor):
        chunk, at = _chunk(_chunk(places, number, factor), place, count), 0
        for run in runs:
            taken = run[max(chunk.start - at, 0) : max(chunk.stop - at, 0)]
            at += len(run)
            if found and taken and found[-1].stop == taken.start:
                found[-1] = range(found[-1].start, taken.stop)
            elif taken:
                found.append(taken)
    return found


def _chunk(places: range, number: int, count: int) -> range:
    """Return one of `count` chunks, as torch.chunk makes them; behind its last they are empty."""
    step = -(-len(places) // count)
    return places[number * step : (number + 1) * step]


def _boxes(runs: Sequence[Sequence[range]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield offsets and sizes of each box in a tensor, and its place in the rank's own part."""
    axes = [zip(axis, accumulate(map(len, axis), initial=0), strict=False) for axis in runs]
    for box in product(*axes):
        offsets, sizes = (tuple(one(run) for run, _ in box) for one in (min, len))
        yield offsets, sizes, tuple(start for _, start in box)


def _parts(file: StoredFile) -> dict[str, _Part]:
    """Return the parts of tensors in one rank's file, by name."""
    stamp = file.stamp()
    records = load_records(file.path)
    if not isinstance(records, Mapping) or not records:
        raise CheckpointError(f"{file} holds no state dict: fetch it again, or {_NEXT}")
    state = cast("Mapping[object, object]", records)
    if len(state) > MAX_TENSORS:
        raise CheckpointError(
            f"{file} has {len(state)} tensors, and {MAX_TENSORS} are read: {_NEXT}"
        )
    found: dict[str, _Part] = {}
    for key, value in state.items():
        name = tensor_name(key, str(file))
        of = partial(LaidPart, file, stamp, name)
        if isinstance(value, Laid):
            header = TensorHeader(name, value.shape, value.dtype)
            found[name] = _Part(header, {(0,) * len(value.shape): of(value)})
        else:
            found[name] = _divided(name, value, of, f"{file}: tensor {shorten(name)}")
    return found


def _divided(name: str, value: object, of: Callable[[Laid], LaidPart], where: str) -> _Part:
    """Read a divided tensor, pickled as a call with (function, class, (class, dtype, shape, …), state)."""
    args: list[object] = list(value.args) if isinstance(value, Inert) else []
    kind = kind_of(args[1]) if len(args) == 4 else kind_of(value)
    if kind == "ShardedTensor" and len(args) == 4:
        return _sharded(name, listed(args[2]), listed(args[3]), of, where)
    if kind != "DTensor" or len(args) != 4:
        raise CheckpointError(
            f"{where} is a {kind}, and neither a tensor nor a DTensor or ShardedTensor: {_NEXT}"
        )
    about, state = listed(args[2]), attributes(args[3])
    local, spec = state.get("_local_tensor"), attributes(state.get("_spec"))
    place = numbers(attributes(spec.get("mesh")).get("_coordinate_on_dim"))
    placements = spec.get("placements")
    shape = numbers(about[2]) if len(about) > 2 else None
    if not isinstance(local, Laid) or shape is None or place is None:
        raise CheckpointError(
            f"{where} is a DTensor that has no shape, mesh or local part: {_NEXT}"
        )
    shards = tuple(_shard(one, shape, where) for one in listed(placements))
    if not shards or len(shards) != len(place) or len(local.shape) != len(shape):
        raise CheckpointError(
            f"{where} is a DTensor with {counted(len(shards), 'placement')} over {len(place)} axes, and "
            f"a local part of shape {list(local.shape)} of {list(shape)}: {_NEXT}"
        )
    order = _order(spec.get("shard_order"), shards, where)
    header = TensorHeader(name, shape, local.dtype)
    return _Part(header, {(): of(local)}, place, shards, order)


def _sharded(
    name: str,
    about: Sequence[object],
    state: Sequence[object],
    of: Callable[[Laid], LaidPart],
    where: str,
) -> _Part:
    """Read a ShardedTensor: (class, dtype, shape, …), and (its local shards, …); a rank may have none."""
    shape = numbers(about[2]) if len(about) > 2 else None
    dtype = DTYPES.get(origin_of(about[1])) if len(about) > 1 else None
    shards = [attributes(one) for one in listed(state[0])] if state else []
    held = {
        place: of(tensor)
        for shard in shards
        if (place := numbers(attributes(shard.get("metadata")).get("shard_offsets"))) is not None
        and isinstance(tensor := shard.get("tensor"), Laid)
    }
    dims = {len(one) for place, part in held.items() for one in (place, part.laid.shape)}
    alike = len(held) == len(shards) and all(part.laid.dtype is dtype for part in held.values())
    if shape is None or dtype is None or dims - {len(shape)} or not alike:
        raise CheckpointError(
            f"{where} is a ShardedTensor without a shape or dtype, or with a shard that does not fit "
            f"these: {_NEXT}"
        )
    return _Part(TensorHeader(name, shape, dtype), held)


def _order(given: object, shards: Sequence[_Shard | None], where: str) -> tuple[int, ...]:
    """Return the order in which axes of the mesh divide a tensor: from the left, if none is given."""
    usual = tuple(range(len(shards)))
    if given is None:
        return usual
    entries = [one.args[-1:] if isinstance(one, Inert) else () for one in listed(given)]
    order = [axis for entry in entries for axes in entry for axis in numbers(axes) or ()]
    divided = [axis for axis in usual if shards[axis] is not None]
    if sorted(order) != divided:
        raise CheckpointError(
            f"{where} is divided along the axes {divided} of its mesh, and has the order {order} of them: "
            f"{_NEXT}"
        )
    return tuple(order)


def _shard(placement: object, shape: Sequence[int], where: str) -> _Shard | None:
    """Return how a placement divides the tensor; None: every rank has the whole tensor."""
    kind, stated = kind_of(placement), attributes(placement)
    if kind == "Replicate":
        return None
    dim, factor = stated.get("dim"), stated.get("split_factor", 1)
    known = kind == "Shard" or (kind == "_StridedShard" and type(factor) is int and 0 < factor)
    if not known or type(dim) is not int or not 0 <= dim < len(shape):
        said = kind if dim is None else f"{kind}({shorten(dim)})"
        raise CheckpointError(
            f"{where} of shape {list(shape)} has the placement {said}, and Shard of one of its axes and "
            f"Replicate are read: {_NEXT}"
        )
    return _Shard(dim, cast("int", factor))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
