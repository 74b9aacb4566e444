"""Writing tensors at their planned offsets, in any order, with a checksum of every piece.

The bytes of the result depend only on the tensors, not on the order of the writes or on how often a
merge was killed and resumed.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError, InputError, TensorError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.layout import Layout, Shard, Slot
from covmerge.files.stores.local import LocalFolder, local_store
from covmerge.files.stores.regular_file import failing_as
from covmerge.files.stores.store import StoredFile

_CHUNK = 8 << 20  # bytes read back at a time


class ShardWriter:
    """The files of a layout, being filled with tensors.

    Creating the writer creates every shard, with its header and its full size reserved. So a full
    disk is found before the first tensor is computed. Shards that exist (when a merge is resumed)
    are kept if they match the layout. No file is open between calls, so the number of shards is not
    limited and a writer can be sent to another process.

    Args:
        folder: an existing folder.
        layout: the place of each tensor.
        made: whether another process has created the files; then nothing is created.

    Raises:
        ResourceError: the disk cannot hold the files; the files that this call created are removed.
        CheckpointError: a file differs from the layout, or is missing although it was created.

    Example:
        >>> from tempfile import mkdtemp
        >>> from covmerge.files.checkpoints.layout import plan_layout
        >>> from covmerge.base.types import TensorHeader
        >>> layout = plan_layout([TensorHeader("w", (2, 3), torch.float32)], 10**9)
        >>> writer = ShardWriter(Path(mkdtemp()), layout)
        >>> checksum = writer.write("w", torch.ones(1, 3), range(1, 2))
        >>> writer.read_back("w", range(1, 2)) == checksum
        True
    """

    def __init__(self, folder: Path | LocalFolder, layout: Layout, *, made: bool = False) -> None:
        self._store = local_store(folder)
        self._shards = {name: shard for shard in layout.shards for name in shard.entries}
        self._files = [shard.file_name for shard in layout.shards]
        if made:
            for shard in layout.shards:
                _refuse_different(StoredFile(self._store, shard.file_name), shard)
        else:
            _create_missing(self._store, layout)

    def write(self, name: str, tensor: Tensor, rows: range | None = None) -> str:
        """Write a tensor, or `rows` of its first axis, and return the checksum of the bytes.

        A complex tensor may be given as real and imaginary parts along a last axis.

        Raises:
            TensorError: the tensor's name, shape, dtype, device or strides are not as planned.
            ResourceError: the disk is full (on systems that cannot reserve space before).
            InputError: the folder does not exist, or may not be written to.
        """
        file_name, slot = self._find(name)
        offset, _ = slot.span(rows)
        if slot.header.dtype.is_complex and not tensor.is_complex():
            tensor = torch.view_as_complex(tensor)
        _refuse_unplanned(tensor, slot, rows)
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data  # without a copy
        with self._missed():
            self._store.write(file_name, data, offset)
        # A checksum finds writes that a crash tore, not manipulation; a hash would take much longer.
        return f"{zlib.crc32(data):08x}"

    def read_back(self, name: str, rows: range | None = None) -> str:
        """Return the checksum of the bytes that the file has for a tensor, or for `rows` of it.

        Raises:
            TensorError: the tensor or the rows are not in the layout.
            CheckpointError: the file is missing, or shorter than planned.
        """
        file_name, slot = self._find(name)
        position, left = slot.span(rows)
        buffer = memoryview(bytearray(min(left, _CHUNK)))
        where, checksum = self._store.where(file_name), 0
        with (
            failing_as(f"cannot read back {where}"),
            self._store.open(file_name, follow=False) as opened,
        ):
            while left:
                count = opened.read_at(buffer[:left], position)
                if not count:
                    raise CheckpointError(
                        f"{where} ends at byte {position}, inside '{name}': something else changed it; "
                        f"start over with {Hint('overwrite')}"
                    )
                checksum = zlib.crc32(buffer[:count], checksum)
                position += count
                left -= count
        return f"{checksum:08x}"

    def flush(self) -> None:
        """Wait until all written bytes are on the disk."""
        self._store.flush(self._files)

    @contextmanager
    def _missed(self) -> Generator[None]:
        """Raise an error that says so if the whole folder is missing on this machine."""
        try:
            yield
        except InputError as error:
            folder = self._store.folder
            if folder.exists():
                raise
            raise InputError(
                f"there is no {folder} on {platform.node()}: machines that share a merge all write there, "
                "so it has to lie in a folder that they share. Choose an output in one; of an output on "
                "a URL set COVMERGE_CACHE to one"
            ) from error

    def _find(self, name: str) -> tuple[str, Slot]:
        if name not in self._shards:
            raise TensorError(f"'{name}' is not in the layout of {self._store}: plan it first")
        shard = self._shards[name]
        return shard.file_name, shard.entries[name]


def _create_missing(store: LocalFolder, layout: Layout) -> None:
    missing: list[Shard] = []
    for shard in layout.shards:
        if store.exists(shard.file_name):
            _refuse_different(StoredFile(store, shard.file_name), shard)
        else:
            missing.append(shard)
    created: list[str] = []
    try:
        for shard in missing:
            needed = sum(other.size for other in missing[len(created) :])
            store.create(shard.file_name, shard.size, shard.header, needed=needed)
            created.append(shard.file_name)
    except BaseException:
        for name in created:
            store.remove(name)
        raise


def _refuse_different(file: StoredFile, shard: Shard) -> None:
    with failing_as(f"cannot resume into {file}"):
        with file.open(follow=False) as opened:
            size, _, _ = opened.stamp
        header = file.read(len(shard.header), follow=False)
    if size != shard.size:
        found = f"it has {size} bytes, planned are {shard.size}"
    elif header != shard.header:
        found = "its header differs from the planned one"
    else:
        return
    raise CheckpointError(
        f"cannot resume into {file}: {found}; start over with {Hint('overwrite')}"
    )


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
