"""SHA-256 of a file and of each of its tensors in one reading, whose blocks can also be inspected."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.base import Pace, at_once
from covmerge.files.checkpoints.header import SafetensorsFile
from covmerge.files.quantised.gguf_file import GGUF, GgufFile
from covmerge.files.stores.regular_file import reading
from covmerge.files.stores.store import Store, StoredFile, file_at

# Receives rows of a tensor that is being hashed; None instead of rows: the tensor has no rows.
Look = Callable[[TensorHeader, range | None, Tensor], None]

_BLOCK_ELEMENTS = 2**20  # small enough to stay in the cache while the block is inspected
_CHUNK = 2**20  # bytes; many files are hashed in parallel, each with a buffer of its own
_WORTH_A_THREAD = 2**18  # bytes
_WITH_TENSORS = {".safetensors": SafetensorsFile, GGUF: GgufFile}


@dataclass(frozen=True)
class FileHashes:
    """SHA-256 of a file, and of its tensors if covmerge writes files of weights in its format."""

    sha256: str
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])

    def as_json(self) -> dict[str, Json]:
        """Return the hashes as in covmerge.json."""
        return {"sha256": self.sha256, **({"tensors": dict(self.tensors)} if self.tensors else {})}


def hash_file(store: Store, name: str, inspect: Look | None = None) -> FileHashes:
    """Read a file of a store once, from the first byte to the last, and return its hashes.

    Raises:
        CheckpointError: it is no regular file, or a link that leads out of the folder.
        FileNotFoundError: there is no such file.
    """
    with (
        _Reader(file_at(store, name)) as file,
        ThreadPool(2, "covmerge-hash") as pool,
    ):
        reads_tensors = _WITH_TENSORS.get(file.file.suffix)
        slots = () if reads_tensors is None else reads_tensors(file.file).slots.values()
        whole = hashlib.sha256()
        tensors: dict[str, str] = {}
        for slot in slots:
            for chunk in file.until(slot.offset):
                whole.update(chunk)
            of_tensor = hashlib.sha256()
            for rows in slot.header.row_blocks(_BLOCK_ELEMENTS):
                data = torch.empty(slot.span(rows)[1], dtype=torch.uint8)
                content = data.numpy().data
                file.fill(content)
                if len(content) < _WORTH_A_THREAD:
                    hashing = []
                    whole.update(content)
                    of_tensor.update(content)
                else:
                    hashing = [pool.submit(digest.update, content) for digest in (whole, of_tensor)]
                if inspect is not None:
                    shape = (
                        slot.header.shape if rows is None else (len(rows), *slot.header.shape[1:])
                    )
                    inspect(slot.header, rows, data.view(slot.header.dtype).reshape(shape))
                for future in hashing:
                    future.result()
            tensors[slot.header.name] = of_tensor.hexdigest()
        for chunk in file.rest():
            whole.update(chunk)
    return FileHashes(whole.hexdigest(), tensors)


def sha256_of(file: StoredFile, pace: Pace = at_once) -> str:
    """Return the SHA-256 of a file."""
    digest, done = hashlib.sha256(), 0
    with _Reader(file) as reader:
        pace(done)
        for chunk in reader.rest():
            digest.update(chunk)
            done += len(chunk)
            pace(done)
    return digest.hexdigest()


class _Reader:
    """A file that is read from the first byte to the last; errors name the file."""

    def __init__(self, file: StoredFile) -> None:
        self.file = file
        self._position = 0
        with reading(file):
            self._opened = file.open()
        self.size, *_ = self._opened.stamp

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def some(self, target: memoryview) -> int:
        """Read some of the next bytes and return their number; 0 at the end of the file."""
        with reading(self.file):
            count = self._opened.read_at(target, self._position)
        self._position += count
        return count

    def fill(self, target: memoryview) -> None:
        """Fill the target with the next bytes."""
        done = 0
        while done < len(target):
            count = self.some(target[done:])
            if not count:
                raise CheckpointError(
                    f"{self.file} was cut short while it was read: verify it again"
                )
            done += count

    def until(self, end: int) -> Iterator[memoryview]:
        """Yield the bytes before offset `end`, in pieces."""
        while self._position < end:
            piece = memoryview(bytearray(min(_CHUNK, end - self._position)))
            self.fill(piece)
            yield piece

    def rest(self) -> Iterator[memoryview]:
        """Yield the remaining bytes in pieces; each piece is valid until the next one is requested."""
        buffer = memoryview(bytearray(max(1, min(_CHUNK, self.size))))
        while count := self.some(buffer):
            yield buffer[:count]
