"""Write tensors at their planned offsets, in any order, with a checksum of every piece.

The result's bytes depend on the tensors alone: not on the order of the writes, nor on how often a
merge was killed and resumed.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from covmerge.checkpoints.layout import Layout, Shard, Slot
from covmerge.errors import CheckpointError, TensorError
from covmerge.stores.descriptor import opened, reserve, write_at
from covmerge.stores.disk import disk_errors, fsync_path
from covmerge.stores.regular_file import open_raw

_CHUNK = 8 << 20  # bytes read back at a time


class ShardWriter:
    """The files of a layout, being filled.

    Creating the writer creates every shard, with its header and its full size reserved, so a full
    disk is met before the first tensor is computed. Shards that exist already (a merge being
    resumed) are kept if they are those of the layout. No file stays open between calls, so the
    number of shards has no limit and a writer may be sent to another process.

    Args:
        folder: an existing folder.
        layout: where each tensor lies.

    Raises:
        ResourceError: the disk cannot hold the files; those that this call created are removed.
        CheckpointError: a file exists that differs from the layout.

    Example:
        >>> from tempfile import mkdtemp
        >>> from covmerge.checkpoints.layout import plan_layout
        >>> from covmerge.types import TensorHeader
        >>> layout = plan_layout([TensorHeader("w", (2, 3), torch.float32)], 10**9)
        >>> writer = ShardWriter(Path(mkdtemp()), layout)
        >>> checksum = writer.write("w", torch.ones(1, 3), range(1, 2))
        >>> writer.read_back("w", range(1, 2)) == checksum
        True
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._shards = {name: shard for shard in layout.shards for name in shard.entries}
        self._files = [folder / shard.file_name for shard in layout.shards]
        _create_missing(folder, layout)

    def write(self, name: str, tensor: Tensor, rows: range | None = None) -> str:
        """Write a tensor, or `rows` of its dimension 0, and return the checksum of the bytes.

        Raises:
            TensorError: the tensor is not as planned: its name, shape, dtype, device or strides.
            ResourceError: the disk is full (where it cannot reserve space beforehand).
        """
        path, slot = self._find(name)
        offset, nbytes = slot.span(rows)
        _refuse_unplanned(tensor, slot, rows)
        data = _bytes_of(tensor)
        with disk_errors(path, nbytes), opened(path, os.O_WRONLY) as fd:
            write_at(fd, data, offset)
        # For writes that a crash tore, not against an adversary: a hash would take much longer.
        return f"{zlib.crc32(data):08x}"

    def read_back(self, name: str, rows: range | None = None) -> str:
        """Return the checksum of what the file holds for a tensor, or for `rows` of it.

        Raises:
            TensorError: the tensor or the rows are not in the layout.
            CheckpointError: the file is gone, or shorter than planned.
        """
        path, slot = self._find(name)
        position, left = slot.span(rows)
        checksum = 0
        try:
            with open_raw(path, follow=False) as file:
                file.seek(position)
                while left:
                    chunk = file.read(min(left, _CHUNK))
                    if not chunk:
                        raise CheckpointError(
                            f"{path} ends at byte {position}, inside '{name}': something else "
                            "changed it; start over with --overwrite"
                        )
                    checksum = zlib.crc32(chunk, checksum)
                    position += len(chunk)
                    left -= len(chunk)
        except OSError as error:
            raise CheckpointError(f"cannot read back {path}: {error.strerror}") from error
        return f"{checksum:08x}"

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        for path in [*self._files, self._folder]:
            with disk_errors(path):
                fsync_path(path)

    def _find(self, name: str) -> tuple[Path, Slot]:
        if name not in self._shards:
            raise TensorError(f"'{name}' is not in the layout of {self._folder}: plan it first")
        shard = self._shards[name]
        return self._folder / shard.file_name, shard.entries[name]


def _create_missing(folder: Path, layout: Layout) -> None:
    missing: list[Shard] = []
    for shard in layout.shards:
        if os.path.lexists(folder / shard.file_name):
            _refuse_different(folder / shard.file_name, shard)
        else:
            missing.append(shard)
    created: list[Path] = []
    try:
        for shard in missing:
            still_needed = sum(other.size for other in missing[len(created) :])
            with disk_errors(folder / shard.file_name, still_needed):
                _create(folder / shard.file_name, shard)
            created.append(folder / shard.file_name)
    except BaseException:
        for path in created:
            path.unlink()
        raise


def _create(path: Path, shard: Shard) -> None:
    """Make the file complete under another name first: under its own it is never half-made."""
    unfinished = path.with_name(f".{path.name}.new")
    try:
        with opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            reserve(fd, shard.size)
            write_at(fd, memoryview(shard.header), 0)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _refuse_different(path: Path, shard: Shard) -> None:
    try:
        with open_raw(path, follow=False) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(len(shard.header))
    except OSError as error:
        raise CheckpointError(f"cannot resume into {path}: {error.strerror}") from error
    if size != shard.size:
        found = f"it has {size} bytes, planned are {shard.size}"
    elif header != shard.header:
        found = "its header differs from the planned one"
    else:
        return
    raise CheckpointError(f"cannot resume into {path}: {found}; start over with --overwrite")


def _refuse_unplanned(tensor: Tensor, slot: Slot, rows: range | None) -> None:
    header = slot.header
    shape = header.shape if rows is None else (len(rows), *header.shape[1:])
    if tuple(tensor.shape) != shape or tensor.dtype != header.dtype:
        raise TensorError(
            f"'{header.name}' was planned as {shape} of {header.dtype}, "
            f"and is {tuple(tensor.shape)} of {tensor.dtype}"
        )
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj():
        raise TensorError(
            f"'{header.name}' is not plain contiguous memory of the CPU (device {tensor.device}, "
            f"strides {tensor.stride()}): call .cpu().contiguous().resolve_conj() on it"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory, as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
