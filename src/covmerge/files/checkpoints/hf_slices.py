"""Folders of torch's HuggingFaceStorageWriter with `save_distributed=True`: safetensors files of each rank.

    shard-00001-model-00001-of-00001.safetensors    of rank 0, and so on

`DCP_SHARDING_INFO` in a file's header has the offset of each of its tensors in the whole tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from functools import partial

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted
from covmerge.base.threads import ThreadPool
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.header import SafetensorsFile
from covmerge.files.checkpoints.json_file import as_object, parse_object, shorten
from covmerge.files.checkpoints.layout import MAX_TENSORS
from covmerge.files.checkpoints.pieces import Piece, Pieced, PiecedFiles
from covmerge.files.checkpoints.unpickler import numbers
from covmerge.files.stores.store import Store, StoredFile, child

SLICES = re.compile(
    r"shard-(?P<rank>[0-9]+)-model-(?P<part>[0-9]+)-of-(?P<count>[0-9]+)\.safetensors", re.ASCII
)
_KEY = "DCP_SHARDING_INFO"
_AT_ONCE = 8


def open_slices(store: Store, names: Collection[str]) -> PiecedFiles | None:
    """Open a folder with such files, or return None if it has none."""
    found = sorted(name for name in names if SLICES.fullmatch(name))
    if not found:
        return None
    where = str(store)
    counts = {match["count"] for name in found if (match := SLICES.fullmatch(name))}
    if len(counts) > 1:
        raise CheckpointError(
            f"{where} has slices of {' and of '.join(sorted(counts))} files, such as {found[0]} and "
            f"{found[-1]}: they are of different checkpoints, move one of these to another folder"
        )
    files = [child(store, name) for name in found]
    with ThreadPool(_AT_ONCE) as pool:  # remote files are slow to open
        opened = list(pool.map(_open, files))
    pieces: dict[str, list[Piece]] = defaultdict(list)
    headers: dict[str, TensorHeader] = {}
    for file, (read, offsets) in zip(files, opened, strict=True):
        for name, header in read.headers.items():
            start = _offsets(offsets.get(name), header, f"{file}: tensor '{name}'")
            pieces[name].append(Piece(start, header.shape, partial(read.read, name)))
            first = headers.setdefault(name, header)
            if (first.dtype, len(first.shape)) != (header.dtype, len(header.shape)):
                raise CheckpointError(
                    f"{file}: tensor '{name}' has another dtype or number of axes than in the files before "
                    "it: the files are of different checkpoints, fetch them again"
                )
    tensors = [
        Pieced(TensorHeader(name, _shape(pieces[name]), header.dtype), pieces[name])
        for name, header in headers.items()
    ]
    note = (
        f"{where}: {counted(len(files), 'file')} of torch.distributed.checkpoint were put together "
        f"by {_KEY}, which has no full shapes: without the last rank's file a tensor is shorter"
    )
    return PiecedFiles(where, files, tensors, note)


def _open(file: StoredFile) -> tuple[SafetensorsFile, dict[str, object]]:
    """Open the file of one rank, and return the entries with the places of its tensors too."""
    read = SafetensorsFile(file)
    text = read.metadata().get(_KEY)
    if text is None:
        raise CheckpointError(
            f"{file} has no {_KEY} in its header, so that the places of its tensors are not known: fetch "
            "it again, or save it again with torch's HuggingFaceStorageWriter"
        )
    most = 80 * MAX_TENSORS
    return read, parse_object(text.encode(), f"{_KEY} of {file}", most)


def _offsets(entry: object, header: TensorHeader, where: str) -> tuple[int, ...]:
    fields = as_object(entry)
    found = numbers(fields.get("saved_offsets"))
    if found is None or len(found) != len(header.shape):
        raise CheckpointError(
            f"{where} of shape {list(header.shape)} has {shorten(fields)} in {_KEY}, not an offset for "
            "each axis: save the checkpoint again"
        )
    return found


def _shape(pieces: list[Piece]) -> tuple[int, ...]:
    """Return the shape that the pieces extend to; whether they fill it is checked later."""
    ends = ([a + b for a, b in zip(p.offsets, p.sizes, strict=True)] for p in pieces)
    return tuple(map(max, zip(*ends, strict=True)))
