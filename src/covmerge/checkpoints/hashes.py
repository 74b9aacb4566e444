"""SHA-256 of a file and of every tensor in it, in one reading that others may look on at."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from covmerge.checkpoints.header import LENGTH_BYTES, data_start, parse_header
from covmerge.checkpoints.layout import Slot
from covmerge.errors import CheckpointError
from covmerge.stores.paths import safe_child
from covmerge.stores.regular_file import open_regular, reading
from covmerge.types import Json, TensorHeader

# Is shown rows of a tensor that are being hashed; None: the whole of one that has no rows.
Look = Callable[[TensorHeader, range | None, Tensor], None]

_BLOCK_ELEMENTS = 2**20  # so that a block is still in the cache when others look at it
_CHUNK = 4 << 20
_WORTH_A_THREAD = 2**18  # bytes


@dataclass(frozen=True)
class FileHashes:
    """SHA-256 of a file, and of each of its tensors if it is a safetensors file."""

    sha256: str
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])

    def as_json(self) -> dict[str, Json]:
        """As in covmerge.json."""
        return {"sha256": self.sha256, **({"tensors": dict(self.tensors)} if self.tensors else {})}


def hash_file(folder: Path, name: str, look: Look | None = None) -> FileHashes:
    """Read a file of a folder once, from its first byte to its last.

    Args:
        folder: the folder.
        name: path of the file in it.
        look: is shown all tensors, block by block, in the order of the file.

    Raises:
        CheckpointError: it is no regular file, or a link that leads out of the folder.
        FileNotFoundError: there is none.
    """
    path = folder
    for part in name.split("/"):
        path = safe_child(path, part)
    with (
        reading(path),
        open_regular(path) as file,
        ThreadPoolExecutor(2, "covmerge-hash") as pool,
    ):
        slots, header = _slots(file, path)
        whole = hashlib.sha256(header)
        tensors: dict[str, str] = {}
        for slot in slots.values():
            own = hashlib.sha256()
            for rows in slot.header.row_blocks(_BLOCK_ELEMENTS):
                data = _read(file, slot.span(rows)[1], path)
                content = data.numpy().data
                if len(content) < _WORTH_A_THREAD:
                    hashing = []
                    whole.update(content)
                    own.update(content)
                else:
                    hashing = [pool.submit(digest.update, content) for digest in (whole, own)]
                if look is not None:
                    shape = (
                        slot.header.shape if rows is None else (len(rows), *slot.header.shape[1:])
                    )
                    look(slot.header, rows, data.view(slot.header.dtype).reshape(shape))
                for future in hashing:
                    future.result()
            tensors[slot.header.name] = own.hexdigest()
        while chunk := file.read(_CHUNK):
            whole.update(chunk)
    return FileHashes(whole.hexdigest(), tensors)


def _slots(file: BufferedReader, path: Path) -> tuple[Mapping[str, Slot], bytes]:
    """The tensors of a safetensors file, and the bytes before them; nothing of any other."""
    if path.suffix != ".safetensors":
        return {}, b""
    size = os.fstat(file.fileno()).st_size
    start = file.read(LENGTH_BYTES)
    try:
        start += file.read(data_start(start, size, str(path)) - LENGTH_BYTES)
        return parse_header(start[LENGTH_BYTES:], size, str(path)), start
    except CheckpointError:  # damaged: its hash will say so
        return {}, start


def _read(file: BufferedReader, size: int, path: Path) -> Tensor:
    data = torch.empty(size, dtype=torch.uint8)
    view, done = memoryview(data.numpy().data), 0
    while done < size:
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{path} was cut short while it was read: verify it again")
        done += count
    return data
