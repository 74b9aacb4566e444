"""Folders of DeepSpeed's ZeRO, in which ranks have parts of the parameters in float32.

    latest                                      names the folder of the last step, global_step500
    global_step500/                             has for each rank
        zero_pp_rank_0_mp_rank_00_model_states.pt       shapes, buffers, parts of frozen parameters
        bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt  parts of the other parameters, in float32

In stage 3 a parameter is flattened, padded to a multiple of the number of ranks, and cut into equal
parts. A rank has its parts one after another in `fp32_flat_groups`. In stages 1 and 2 the
parameters of a group are one after another in a vector, which is cut into
`single_partition_of_fp32_groups`; one file for all ranks, mp_rank_00_model_states.pt, has the rest.
The files are read as records (`unpickler.py`), so that nothing in them is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted
from covmerge.base.threads import ThreadPool
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import tensor_name
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.checkpoints.layout import MAX_TENSORS
from covmerge.files.checkpoints.pickled import load_records
from covmerge.files.checkpoints.pieces import Piece, Pieced, PiecedFiles
from covmerge.files.checkpoints.unpickler import Laid, LaidPart, listed, numbers
from covmerge.files.stores.paths import check_bare
from covmerge.files.stores.store import Store, StoredFile, child

_LATEST = "latest"
_STEP = re.compile(r"global_step[0-9]+", re.ASCII)
_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>[0-9]{1,6})_)?mp_rank_(?P<parallel>[0-9]{1,6})_"
    r"(?P<kind>model|optim)_states\.pt",
    re.ASCII,
)
_NEXT = (
    "gather it with the checkpoint's own script: python zero_to_fp32.py FOLDER NEW, and pass NEW"
)
_DIVIDED, _VECTORS = "fp32_flat_groups", "single_partition_of_fp32_groups"
_AT_ONCE = 4
_MAX_TAG = 200

_Group = Sequence[tuple[int, LaidPart]]  # a rank's flat tensors, each with its start


def open_zero(store: Store, names: Collection[str]) -> PiecedFiles | None:
    """Open a folder of ZeRO, or a folder that contains one; return None if there is none."""
    found = _step_folder(store, names)
    if found is None:
        return None
    store, matches = found
    where = str(store)
    if any(int(match["parallel"]) for match in matches):
        raise CheckpointError(
            f"{where} is of a training with tensor parallelism ({matches[0].string}), whose parts are of "
            "other shapes: load it where it was trained, and save the model there"
        )
    held = {(match["kind"], int(match["rank"] or 0)): match.string for match in matches}
    world = 1 + max(rank for _, rank in held)
    # Whether the model's parameters are divided, and not only the optimizer's states.
    divided = _is_divided(matches)
    states_of = {"model": world if divided else 1, "optim": world}
    missing = [
        (kind, n)
        for kind, ranks in states_of.items()
        for n in range(ranks)
        if (kind, n) not in held
    ]
    if missing:
        kind, rank = missing[0]
        raise CheckpointError(
            f"{where} has no *_rank_{rank}_mp_rank_00_{kind}_states.pt: fetch the missing files, as "
            "every rank has a part of the model"
        )
    models, optims = (
        [child(store, held[kind, rank]) for rank in range(ranks)]
        for kind, ranks in states_of.items()
    )
    with ThreadPool(_AT_ONCE) as pool:
        records = list(pool.map(load_records, [file.path for file in (*models, *optims)]))
    states = [_mapping(one, str(file)) for one, file in zip(records, models, strict=False)]
    key = _DIVIDED if divided else _VECTORS
    groups = [
        _flat_groups(one, file, world, key)
        for one, file in zip(records[len(models) :], optims, strict=True)
    ]
    tensors = [*_whole(states[0], models[0], "module", listed(states[0].get("buffer_names")))]
    if divided:
        tensors += [*_frozen(states, models), *_trained(states, models, groups)]
    else:
        frozen = _shapes(states[0].get("frozen_param_shapes") or {}, str(models[0]))
        tensors += _whole(states[0], models[0], "frozen_param_fragments", frozen)
        paddings = _state(records[1], optims[0]).get("param_alignment_paddings")
        tensors += _in_vectors(states[0], models[0], groups, paddings)
    tensors += _shared(states[0], tensors, models[0])
    if len({one.header.name for one in tensors}) < len(tensors) or len(tensors) > MAX_TENSORS:
        raise CheckpointError(f"{where} has two tensors of one name, or far too many: {_NEXT}")
    note = (
        f"{where}: the parameters of {counted(world, 'rank')} of DeepSpeed's ZeRO were put "
        "together, those that were trained from the optimizer's weights in float32"
    )
    return PiecedFiles(where, [*models, *optims], tensors, note)


def _step_folder(store: Store, names: Collection[str]) -> tuple[Store, list[re.Match[str]]] | None:
    """Return the folder with the files of the ranks: this one, or the one that `latest` names."""
    if matches := _of_ranks(names):
        return store, matches
    steps = [name for name in store.folders() if _STEP.fullmatch(name)]
    if _LATEST in names:
        file = StoredFile(store, _LATEST)
        tag = file.read(_MAX_TAG).decode(errors="replace").strip()
        if tag not in store.folders():
            return None
        check_bare(tag, str(file))
        steps = [tag]
    if len(steps) != 1:
        return None
    if store.folder is not None:
        store.check(steps[0])
    inner = store.inside(steps[0])
    matches = _of_ranks(inner.names())
    return (inner, matches) if matches else None


def _of_ranks(names: Collection[str]) -> list[re.Match[str]]:
    """Return the files of the ranks and, in stages 1 and 2, the file that all ranks share."""
    matches = [match for name in names if (match := _FILE.fullmatch(name))]
    if _is_divided(matches):
        return [match for match in matches if match["rank"]]
    kinds = {match["kind"] for match in matches if match["rank"] or match["kind"] == "model"}
    return matches if kinds == {"model", "optim"} else []


def _is_divided(matches: Sequence[re.Match[str]]) -> bool:
    return any(match["kind"] == "model" and match["rank"] for match in matches)


def _state(record: object, file: StoredFile) -> Mapping[object, object]:
    return _mapping(_mapping(record, str(file)).get("optimizer_state_dict"), str(file))


def _flat_groups(record: object, file: StoredFile, world: int, key: str) -> _Group:
    """Return the flat tensors of a rank's trained parameters, one after another."""
    where = str(file)
    state = _state(record, file)
    counts = state.get("partition_count")
    if not {*(listed(counts) or (counts,))} <= {world}:
        raise CheckpointError(
            f"{where} is of {shorten(counts)} ranks, and the folder has files of "
            f"{world}: files are missing, or of different checkpoints, fetch them again"
        )
    found: list[tuple[int, LaidPart]] = []
    reached = 0
    for index, one in enumerate(listed(state.get(key))):
        laid = _laid(one, f"{where}: {key}[{index}]")
        found.append((reached, _part(file, f"{key}[{index}]", laid)))
        reached += laid.shape[0]
    size, *_ = file.stamp()
    if 4 * reached > size or any(part.laid.dtype != torch.float32 for _, part in found):
        raise CheckpointError(
            f"{where} has {reached} numbers in {key}, and {size} bytes: they are not in "
            f"float32, or share their bytes, {_NEXT}"
        )
    return found


def _trained(
    states: Sequence[Mapping[object, object]], files: Sequence[StoredFile], groups: Sequence[_Group]
) -> Iterator[Pieced]:
    """Yield the trained parameters, in the order of the ranks' parts."""
    shapes = [_shapes(one, str(files[0])) for one in listed(states[0].get("param_shapes"))]
    for state, file in zip(states[1:], files[1:], strict=True):
        if shapes != [_shapes(one, str(file)) for one in listed(state.get("param_shapes"))]:
            raise CheckpointError(
                f"{file} has other parameters or shapes than {files[0].name}: they are of different "
                "checkpoints, fetch them again"
            )
    world, start = len(states), 0
    for name, shape in (item for group in shapes for item in group.items()):
        size = -(-math.prod(shape) // world)
        pieces = [
            piece
            for rank, group in enumerate(groups)
            for piece in _cut(group, start, size, rank * size, math.prod(shape))
        ]
        yield Pieced(TensorHeader(name, shape, torch.float32), pieces, flat=True)
        start += size
    for group, file in zip(groups, files, strict=True):  # the padding is counted too
        held = sum(part.laid.shape[0] for _, part in group)
        if held != start:
            raise CheckpointError(
                f"{file} names parameters of {start} numbers a rank, and fp32_flat_groups of the same rank "
                f"have {held}: {_NEXT}"
            )


def _cut(group: _Group, start: int, size: int, at: int, whole: int) -> Iterator[Piece]:
    """Yield a rank's pieces of a tensor of `whole` numbers: those from `at` on, stored from `start` on."""
    stop = start + min(size, max(0, whole - at))  # the rest is padding
    for first, part in group:
        begin, end = max(start, first), min(stop, first + part.laid.shape[0])
        if begin < end:
            yield Piece(
                (at + begin - start,), (end - begin,), part.within((begin - first,), (end - begin,))
            )


def _frozen(
    states: Sequence[Mapping[object, object]], files: Sequence[StoredFile]
) -> Iterator[Pieced]:
    """Yield the parameters that were not trained, in the dtype of the model."""
    shapes = _shapes(states[0].get("frozen_param_shapes") or {}, str(files[0]))
    for name, shape in shapes.items():
        whole, pieces, at = math.prod(shape), list[Piece](), 0
        dtype = torch.float32
        for state, file in zip(states, files, strict=True):
            where = f"{file}: frozen_param_fragments"
            laid = _laid(_mapping(state.get("frozen_param_fragments"), where).get(name), where)
            if pieces and laid.dtype != dtype:
                raise CheckpointError(
                    f"{where}: '{name}' has another dtype than on rank 0: {_NEXT}"
                )
            dtype = laid.dtype
            taken = min(laid.shape[0], whole - at)
            if taken:
                pieces.append(
                    Piece((at,), (taken,), _part(file, name, laid).within((0,), (taken,)))
                )
            at += taken
        yield Pieced(TensorHeader(name, shape, dtype), pieces, flat=True)


def _in_vectors(
    state: Mapping[object, object], file: StoredFile, groups: Sequence[_Group], paddings: object
) -> Iterator[Pieced]:
    """Yield the trained parameters of stages 1 and 2, stored one after another in a group's vector."""
    shapes = [_shapes(one, str(file)) for one in listed(state.get("param_shapes"))]
    counts = {len(group) for group in groups} | {len(shapes)}
    if len(counts) > 1:
        raise CheckpointError(
            f"{file} has {len(shapes)} groups of parameters, and the ranks have {counts}: {_NEXT}"
        )
    for index, group in enumerate(shapes):
        vector: list[tuple[int, LaidPart]] = []
        held, start = 0, 0
        for _, part in (rank[index] for rank in groups):
            vector.append((held, part))
            held += part.laid.shape[0]
        after = _after(paddings, index, group, file)
        for place, (name, shape) in enumerate(group.items()):
            size = math.prod(shape)
            pieces = list(_cut(vector, start, size, 0, size))
            yield Pieced(TensorHeader(name, shape, torch.float32), pieces, flat=True)
            start += size + after[place]
        if not 0 <= held - start < 2 * len(groups):  # DeepSpeed pads to 2 × ranks
            raise CheckpointError(
                f"{file} names parameters of {start} numbers, and the ranks have {held} of them: {_NEXT}"
            )


def _after(paddings: object, index: int, group: Collection[str], file: StoredFile) -> Sequence[int]:
    """Return the padding after each parameter of a group."""
    if not listed(paddings):
        return (0,) * len(group)
    found = numbers(listed(paddings)[index]) if index < len(listed(paddings)) else None
    if found is None or len(found) != len(group):
        raise CheckpointError(f"{file} has parameters without paddings, or the reverse: {_NEXT}")
    return found


def _whole(
    state: Mapping[object, object], file: StoredFile, key: str, names: Iterable[object]
) -> Iterator[Pieced]:
    """Yield tensors that every rank has completely, from rank 0 as in DeepSpeed's own script."""
    module = _mapping(state.get(key) or {}, f"{file}: {key}")
    for name in names:
        value = module.get(name)
        if isinstance(name, str) and value is None:
            continue  # a buffer that is not persistent
        checked = tensor_name(name, str(file))
        laid = _laid(value, f"{file}: '{checked}'", axes=None)
        header = TensorHeader(checked, laid.shape, laid.dtype)
        offsets = (0,) * len(laid.shape)
        yield Pieced(header, [Piece(offsets, laid.shape, _part(file, checked, laid))])


def _shared(
    state: Mapping[object, object], tensors: Sequence[Pieced], file: StoredFile
) -> list[Pieced]:
    """Return parameters that are another parameter under a second name."""
    known = {tensor.header.name: tensor for tensor in tensors}
    found: list[Pieced] = []
    for name, other in _mapping(state.get("shared_params") or {}, f"{file}: shared_params").items():
        if isinstance(other, str) and other in known:
            second = tensor_name(name, str(file))
            tensor = known[other]
            header = TensorHeader(second, tensor.header.shape, tensor.header.dtype)
            found.append(Pieced(header, tensor.pieces, tensor.flat))
    return found


def _part(file: StoredFile, name: str, laid: Laid) -> LaidPart:
    return LaidPart(file, file.stamp(), name, laid)


def _laid(value: object, where: str, axes: int | None = 1) -> Laid:
    if not isinstance(value, Laid) or (axes is not None and len(value.shape) != axes):
        raise CheckpointError(f"{where} holds no flat tensor where ZeRO has one: {_NEXT}")
    return value


def _shapes(value: object, where: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, sizes in _mapping(value, f"{where}: param_shapes").items():
        shape = numbers(sizes)
        if shape is None or math.prod(max(1, n) for n in shape) >= 2**60:
            raise CheckpointError(
                f"{where} has the shape {shorten(sizes)} of {shorten(name)}: {_NEXT}"
            )
        found[tensor_name(name, where)] = shape
    return found


def _mapping(value: object, where: str) -> Mapping[object, object]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} holds no dict where ZeRO has one: {_NEXT}")
    return cast("Mapping[object, object]", value)
