"""Folders of torch.distributed.checkpoint that are damaged, merged to the end within 500 MB.

    python -m tests.campaigns.distributed --count 40 --seed 0

An expert is such a folder: every matrix in four blocks, every block in a file. It is damaged in one way.
Then the merge has the values that were saved, or is refused by name.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.campaigns.disturbed import limit_memory
from tests.campaigns.outcomes import (
    TRACEBACK,
    Kind,
    Tensors,
    Verdict,
    average,
    covmerge,
    judge,
    models,
    recipe,
)
from tests.campaigns.outcomes import (
    main as campaign_of,
)

_METADATA = ".metadata"
_MEMORY = 500 * 2**20
_HALF = 8  # rows and columns of a block
_TRIP = Path("/tmp/covmerge-campaign-was-here")

Box = tuple[torch.Size, torch.Size]


class _Called:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(_TRIP),)


def laid(tensors: Tensors, folder: Path) -> None:
    """Save tensors in blocks, each in a file, as several processes would."""
    boxes: dict[str, tuple[str, Box]] = {}
    blocks: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for row in range(0, tensor.shape[0], _HALF):
            for column in range(0, tensor.shape[1], _HALF) if tensor.ndim == 2 else (None,):
                at = (row,) if column is None else (row, column)
                block = tensor[tuple(slice(first, first + _HALF) for first in at)].clone()
                key = f"{name} {at}"
                blocks[key], boxes[key] = block, (name, (torch.Size(at), block.shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.save(blocks, storage_writer=FileSystemWriter(folder, single_file_per_rank=False))
    metadata = _read(folder)
    stored = {index.fqn: info for index, info in metadata.storage_data.items()}
    kind = TensorProperties(torch.float32)
    metadata.state_dict_metadata = {
        name: TensorStorageMetadata(kind, tensor.shape, []) for name, tensor in tensors.items()
    }
    metadata.storage_data, metadata.planner_data = {}, None
    for key, (name, box) in boxes.items():
        metadata.state_dict_metadata[name].chunks.append(ChunkStorageMetadata(*box))
        metadata.storage_data[MetadataIndex(name, box[0])] = stored[key]
    _write(folder, metadata)


def _read(folder: Path) -> Metadata:
    return pickle.loads((folder / _METADATA).read_bytes())


def _write(folder: Path, metadata: object) -> None:
    (folder / _METADATA).write_bytes(pickle.dumps(metadata))


def _bytes(folder: Path, random: Random) -> None:
    """The metadata's bytes: some are others, are zero, or are missing, or there are more."""
    path = folder / _METADATA
    data = bytearray(path.read_bytes())
    at = random.randrange(len(data))
    what = random.choice(("flip", "flip", "flip", "cut", "zeros", "more"))
    if what == "flip":
        for _ in range(random.choice((1, 1, 2, 4))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif what == "cut":
        del data[at:]
    elif what == "zeros":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    else:
        data[at:at] = random.randbytes(random.randrange(1, 64))
    path.write_bytes(data)


def _numbers(folder: Path, random: Random) -> None:
    """A number of a chunk, of a tensor's size or of a place in a file."""
    metadata = _read(folder)
    name = random.choice(sorted(metadata.state_dict_metadata))
    tensor = metadata.state_dict_metadata[name]
    chunk = random.choice(tensor.chunks)
    place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    owner, own = random.choice(
        (
            (tensor, "size"),
            (chunk, "offsets"),
            (chunk, "sizes"),
            (place, "offset"),
            (place, "length"),
        )
    )
    before = getattr(owner, own)
    others = (0, 1, 7, 9, 16, 32, -1, 2**31, 2**62, 2**63, 10**30)
    if isinstance(before, torch.Size):
        numbers: list[Any] = list(before)
        change = random.choice(("one", "one", "more", "fewer", "exchanged"))
        if change == "one":
            numbers[random.randrange(len(numbers))] = random.choice(others[:9])
        elif change == "more":
            numbers.append(random.choice((0, 1, 2)))
        elif change == "fewer":
            numbers.pop()
        else:
            numbers.reverse()
        # A chunk's size and what is stored under its offsets are read as they are written here.
        _set(owner, own, torch.Size(numbers) if max(numbers, default=0) < 2**63 else numbers)
    else:
        _set(owner, own, random.choice((before + 1, before - 1, before // 2, *others)))
    _write(folder, metadata)


def _set(owner: object, name: str, value: object) -> None:
    """Set an attribute of a record that may be frozen."""
    object.__setattr__(owner, name, value)


def _chunks(folder: Path, random: Random) -> None:
    """A chunk that is missing, is there twice, overlaps, is another's, or is in no file."""
    metadata = _read(folder)
    name, other = random.sample(sorted(metadata.state_dict_metadata), 2)
    tensor = metadata.state_dict_metadata[name]
    chunk = random.choice(tensor.chunks)
    index = MetadataIndex(name, chunk.offsets)
    what = random.randrange(8)
    if what == 0:
        tensor.chunks.remove(chunk)
    elif what == 1:
        tensor.chunks.append(chunk)
    elif what == 2:  # overlaps its neighbour, or leaves a gap
        moved = torch.Size(max(0, own + random.choice((-4, 4))) for own in chunk.offsets)
        tensor.chunks[tensor.chunks.index(chunk)] = ChunkStorageMetadata(moved, chunk.sizes)
        metadata.storage_data[MetadataIndex(name, moved)] = metadata.storage_data.pop(index)
    elif what == 3:
        del metadata.storage_data[index]
    elif what == 4:  # the bytes of another tensor's chunk
        metadata.storage_data[index] = random.choice(
            [own for key, own in metadata.storage_data.items() if key.fqn == other]
        )
    elif what == 5:
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[other]
    elif what == 6:
        del metadata.state_dict_metadata[name]
    else:
        dtype = random.choice((torch.float64, torch.bfloat16, torch.int32, torch.complex64))
        tensor.properties = TensorProperties(dtype)
    _write(folder, metadata)


def _files(folder: Path, random: Random) -> None:
    """Files that are missing, cut, longer, empty, of other bytes, a hole of a terabyte or a link."""
    paths = sorted(folder.glob("*.distcp"))
    path = random.choice(paths)
    data = path.read_bytes()
    what = random.randrange(7)
    if what == 0:
        for gone in random.sample(paths, random.choice((1, 2, len(paths)))):
            gone.unlink()
    elif what == 1:
        path.write_bytes(data[: random.randrange(len(data))])
    elif what == 2:
        path.write_bytes(data + b"x" * random.randrange(1, 99))
    elif what == 3:
        path.write_bytes(b"")
    elif what == 4:
        path.write_bytes(random.randbytes(len(data)))
    elif what == 5:
        os.truncate(path, 2**40)
    else:
        path.unlink()
        path.symlink_to("/dev/zero")


def _names(folder: Path, random: Random) -> None:
    """Names of files that lead elsewhere, and of tensors that are no names."""
    metadata = _read(folder)
    names = (
        "../x",
        "/etc/passwd",
        "",
        ".",
        "a/b",
        "x" * 5000,
        "\0",
        ".metadata",
        7,
        None,
        "\udc80",
    )
    if random.random() < 0.6:
        place = random.choice(list(metadata.storage_data.values()))
        _set(place, "relative_path", random.choice(names))
    else:
        name = random.choice(sorted(metadata.state_dict_metadata))
        metadata.state_dict_metadata[random.choice(names)] = metadata.state_dict_metadata.pop(name)
    _write(folder, metadata)


def _steps(folder: Path, random: Random) -> None:
    """Pickles that call, nest without end, or claim or become more than there is."""
    metadata = _read(folder)
    what = random.randrange(7)
    if what == 0:
        _set(metadata, random.choice([own.name for own in fields(metadata)]), _Called())
        _write(folder, metadata)
        return
    if what == 1:
        _write(folder, [_Called(), metadata])
        return
    many = random.choice((10_000, 1_000_000))
    data = {
        2: b"\x80\x04" + b"(" * many + b"t" * many + b".",
        3: b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x.",  # a text of so many bytes
        4: b"\x80\x04\x8b" + (2**31 - 1).to_bytes(4, "little") + b"\1.",  # a number of so many
        5: b"\x80\x04]q\0"
        + b"".join(
            b"]q" + bytes([n + 1]) + b"(" + 10 * (b"h" + bytes([n])) + b"e" for n in range(60)
        )
        + b".",  # lists of ten times the one before
        6: b"\x80\x04K\1" + b"2" * many + b".",
    }[what]
    (folder / _METADATA).write_bytes(data)


def damaged(damage: Callable[[Path, Random], None], folder: Path, random: Random) -> Verdict:
    """Merge with an expert whose folder is damaged."""
    made, expert = models(random), folder / "a"
    laid(made["a"], expert)
    damage(expert, random)
    given = {name: folder / f"{name}.safetensors" for name in ("base", "b")}
    for name, path in given.items():
        save_file(made[name], path)
    written, out = recipe(folder, **given, a=expert), folder / "out"
    ended = covmerge(folder, "merge", written, out, before=partial(limit_memory, _MEMORY))
    if _TRIP.exists():
        _TRIP.rmdir()
        return TRACEBACK, "code was run"
    return judge(ended, out, average(made["a"], made["b"]), (str(expert), "expert 'a'"))


def _none(folder: Path, random: Random) -> None:
    """Nothing."""


KINDS: Mapping[str, Kind] = {
    f"distcp: {name}": partial(damaged, damage)
    for name, damage in {
        "nothing": _none,
        "bytes of the metadata": _bytes,
        "sizes, offsets and places": _numbers,
        "missing and overlapping chunks": _chunks,
        "files of shards": _files,
        "names": _names,
        "pickles": _steps,
    }.items()
}

main = partial(campaign_of, __doc__, KINDS)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
