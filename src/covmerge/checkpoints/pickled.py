"""What a pickle says of tensors, without running anything that it names.

`torch.save(module)` and `pickle.dump(module)` store a program: which classes to make, which functions
to call. It is read here by an unpickler that knows storages, torch's functions that lay a tensor over a
storage, and `OrderedDict`. Whatever else is named becomes an inert record of its arguments and its state:
no module is imported for it and nothing is called.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from covmerge.checkpoints.pickle_bounds import ZIP_MAGIC, check_archive, check_steps, check_whole
from covmerge.checkpoints.regular_file import open_regular, reading
from covmerge.errors import CheckpointError

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # torch's own, at the start of its format from before 1.6
_MAX_NAMES = 10_000  # of classes and functions; a module has some tens
_NEXT = "fetch the file again, or save the state dict with safetensors.torch.save_file where you trust it"
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Sealed(type):
    """A class whose attributes a pickle cannot set: a stand-in of what is called `origin`."""

    origin: str

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"the pickle sets '{name}' of a class")


class Inert(metaclass=Sealed):
    """What stands in for an object of any class that is not known here."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Record the arguments."""
        made = super().__new__(cls)
        object.__setattr__(made, "args", args)
        object.__setattr__(made, "state", None)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: object

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        """Answer a call with another record."""
        return Inert(*args)

    def __setstate__(self, state: object) -> None:
        """Record the state."""
        object.__setattr__(self, "state", state)

    def __setitem__(self, key: object, value: object) -> None:
        """Let a dict's entries go by: no tensor of a module is in one."""

    def append(self, value: object) -> None:
        """Let a list's entries go by."""

    def extend(self, values: object) -> None:
        """Let a list's entries go by."""

    def add(self, value: object) -> None:
        """Let a set's entries go by."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Call:
    """A function of ours that a pickle may call, and not change."""

    __slots__ = ("_function",)
    _function: Callable[..., object]

    def __init__(self, function: Callable[..., object]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> object:
        return self._function(*args)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"the pickle sets '{name}' of a function")


@dataclass(frozen=True)
class _Storage:
    """Numbers of one dtype in the file; `read(first, count)` returns the bytes of some of them."""

    dtype: torch.dtype
    count: int
    read: Callable[[int, int], bytes]


@dataclass(frozen=True)
class Laid:
    """A tensor that is laid over a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its numbers."""
        return self.storage.dtype

    def tensor(self, rows: range | None = None) -> Tensor:
        """Read (rows of) it into memory of its own, and of its storage what lies between.

        Raises:
            CheckpointError: the file ends early.
        """
        first, shape = self.offset, self.shape
        if rows is not None:
            first, shape = first + rows.start * self.strides[0], (len(rows), *shape[1:])
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        spanned = sum((n - 1) * step for n, step in zip(shape, self.strides, strict=True)) + 1
        data = bytearray(self.storage.read(first, spanned))
        # As bytes, truth values stay as they are stored, whatever they are.
        dtype = torch.uint8 if self.dtype is torch.bool else self.dtype
        laid = torch.as_strided(torch.frombuffer(data, dtype=dtype), shape, self.strides)
        return laid.clone(memory_format=torch.contiguous_format).view(self.dtype)


@dataclass
class _Loading:
    """A file that is being read, and what it may still make.

    Attributes:
        where: its path.
        left: bytes that it may still make; a storage was text once, then bytes, then numbers.
        kinds: the stand-ins of what it names.
    """

    where: str
    left: int
    kinds: dict[str, type[Inert]] = field(default_factory=dict[str, "type[Inert]"])

    def make(self, size: int) -> None:
        """Count bytes that are about to be made.

        Raises:
            CheckpointError: there are more than the file has.
        """
        self.left -= size
        if self.left < 0:
            raise CheckpointError(f"{self.where} makes more bytes than it holds: {_NEXT}")

    def kind(self, origin: str) -> type[Inert]:
        """Return the stand-in of a class or function.

        Raises:
            CheckpointError: there are too many.
        """
        if origin not in self.kinds:
            if len(self.kinds) == _MAX_NAMES:
                raise CheckpointError(
                    f"{self.where} names more than {_MAX_NAMES} classes and functions: {_NEXT}"
                )
            self.kinds[origin] = Sealed("Inert", (Inert,), {"origin": origin})
        return self.kinds[origin]


def load_records(path: Path) -> object:
    """Return what is pickled in a file of `torch.save` (of any version) or `pickle.dump`.

    Plain values are themselves, tensors are `Laid`, and objects are `Inert`.

    Raises:
        CheckpointError: the file is damaged, or promises more than it holds.
    """
    where = str(path)
    try:
        with reading(path), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            loading = _Loading(where, 2 * size)
            if file.read(len(ZIP_MAGIC)) == ZIP_MAGIC:
                with zipfile.ZipFile(file) as archive:
                    check_archive(archive, where)
                    return _load_archive(archive, path, file, loading)
            check_whole(size, where)
            file.seek(0)
            return _load_bytes(file.read(), loading)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except Exception as error:  # hostile bytes make zipfile and the unpickler raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{where} cannot be read as a pickled module ({type(error).__name__}: {reason}): {_NEXT}"
        ) from error


# The formats


def _load_archive(
    archive: zipfile.ZipFile, path: Path, file: IO[bytes], loading: _Loading
) -> object:
    """A zip of torch: `*/data.pkl`, and a member `*/data/KEY` for each storage."""
    where = loading.where
    found = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
    if len(found) != 1:
        raise CheckpointError(f"{where} has {len(found)} members data.pkl, not one: {_NEXT}")
    folder = found[0].filename.removesuffix("data.pkl")

    def storage(dtype: torch.dtype, key: str, count: int) -> _Storage:
        member = f"{folder}data/{key}"
        try:
            entry = archive.getinfo(member)
        except KeyError:
            raise CheckpointError(f"{where} has no member {member}: {_NEXT}") from None
        # What the file really has, not what it says, decides how much is allocated.
        if not entry.compress_size == entry.file_size == count * dtype.itemsize:
            raise CheckpointError(
                f"{where}: {member} holds {entry.compress_size} bytes, and {count} numbers of {dtype} "
                f"take {count * dtype.itemsize}: {_NEXT}"
            )
        start = _data_start(file, entry)
        if start + entry.file_size > os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{where}: {member} goes on after the end of the file: {_NEXT}")

        def read(first: int, wanted: int) -> bytes:
            return _read_at(path, start + first * dtype.itemsize, wanted * dtype.itemsize)

        return _Storage(dtype, count, read)

    return _unpickle(archive.read(found[0]), loading, storage)


def _data_start(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: after a header of its own, whose length only it has."""
    file.seek(entry.header_offset)
    name, extra = struct.unpack("<26x2H", file.read(30))
    return entry.header_offset + 30 + name + extra


def _read_at(path: Path, start: int, size: int) -> bytes:
    with reading(path), open_regular(path) as file:
        file.seek(start)
        data = file.read(size)
    if len(data) != size:
        raise CheckpointError(f"{path} ends at byte {start + len(data)}: {_NEXT}")
    return data


def _load_bytes(data: bytes, loading: _Loading) -> object:
    """Torch's format from before 1.6, or a plain pickle."""
    stream, where = io.BytesIO(data), loading.where
    first = _next_pickle(stream, where)
    found = _unpickle(first, loading, _no_storage(where))
    if found != _LEGACY_MAGIC:
        return found
    for _ in ("protocol", "system"):
        _next_pickle(stream, where)
    declared: dict[str, _Storage] = {}
    places: dict[str, bytes] = {}

    def storage(dtype: torch.dtype, key: str, count: int) -> _Storage:
        def read(first: int, wanted: int) -> bytes:
            return places[key][first * dtype.itemsize : (first + wanted) * dtype.itemsize]

        return declared.setdefault(key, _Storage(dtype, count, read))

    content = _unpickle(_next_pickle(stream, where), loading, storage)
    keys = _unpickle(_next_pickle(stream, where), loading, _no_storage(where))
    for key in cast("list[str]", keys):
        if key not in declared:
            raise CheckpointError(f"{where} has the storage {key!r}, which nothing uses: {_NEXT}")
        places[key] = _legacy_storage(stream, declared[key], f"{where}: storage {key}")
    return content


def _legacy_storage(stream: io.BytesIO, storage: _Storage, where: str) -> bytes:
    """Read a count and as many numbers."""
    (count,) = struct.unpack("<q", stream.read(8))
    size = storage.count * storage.dtype.itemsize
    data = stream.read(size)
    if count != storage.count or len(data) != size:
        raise CheckpointError(
            f"{where} says {count} numbers of {storage.dtype} and holds {len(data)} bytes, where "
            f"{storage.count} were announced: {_NEXT}"
        )
    return data


def _next_pickle(stream: io.BytesIO, where: str) -> bytes:
    """Return the bytes of one pickle, checked for what would take memory before any check of ours."""
    start = stream.tell()
    check_steps(stream, where)
    stream.seek(start)
    left = stream.getbuffer().nbytes - start
    for opcode, argument, _ in pickletools.genops(stream):
        # The unpickler's memo is an array, and an index makes it that long.
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and cast("int", argument) > left:
            raise CheckpointError(
                f"{where}: the pickle counts {argument} objects in {left} bytes: {_NEXT}"
            )
        if opcode.name.startswith("EXT"):
            raise CheckpointError(f"{where}: the pickle names objects by a registry: {_NEXT}")
    end = stream.tell()
    return stream.getvalue()[start:end]


_StorageOf = Callable[[torch.dtype, str, int], _Storage]


def _no_storage(where: str) -> _StorageOf:
    def refuse(dtype: torch.dtype, key: str, count: int) -> _Storage:
        raise CheckpointError(f"{where} has a storage outside of torch's formats: {_NEXT}")

    return refuse


def _unpickle(data: bytes, loading: _Loading, storage: _StorageOf) -> object:
    return _Unpickler(_next_pickle(io.BytesIO(data), loading.where), loading, storage).load()


class _Unpickler(pickle.Unpickler):
    """Knows tensors and `OrderedDict`; of everything else it keeps a record."""

    def __init__(self, data: bytes, loading: _Loading, storage: _StorageOf) -> None:
        super().__init__(io.BytesIO(data))
        self._loading = loading
        self._where = loading.where
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return our own stand-in; nothing is looked up and nothing is imported."""
        known: dict[str, Callable[..., object]] = {
            "torch._utils._rebuild_tensor": self._laid,
            "torch._utils._rebuild_tensor_v2": self._laid,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            "torch.storage._load_from_bytes": self._whole,
            "torch.Size": _first,
            "copy_reg._reconstructor": _made,
            "_codecs.encode": self._latin,
        }
        origin = f"{module_name}.{global_name}"
        if origin == "collections.OrderedDict":
            return OrderedDict
        if origin in known:
            return _Call(known[origin])
        if module_name == "torch" and global_name in _DTYPES:
            return _DTYPES[global_name]
        return self._loading.kind(origin)

    def persistent_load(self, pid: Any, /) -> Any:
        """Return a storage of the file, or the class of a module, which old files store with its source."""
        match pid:
            case ("module", type() as kind, *_) if issubclass(kind, Inert):
                return kind
            case ("storage", torch.dtype() as dtype, str(key), _, int(count), *rest) if count >= 0:
                if all(item is None for item in rest):
                    return self._storage(dtype, key, count)
            case _:
                pass
        raise CheckpointError(
            f"{self._where} has a storage that is not of one of {', '.join(_DTYPES)}: {_NEXT}"
        )

    def _whole(self, data: object) -> object:
        """A storage that was pickled as the bytes of a file of its own."""
        if not isinstance(data, bytes):
            raise CheckpointError(f"{self._where}: a storage is no bytes: {_NEXT}")
        self._loading.make(len(data))
        return _load_bytes(data, self._loading)

    def _latin(self, text: object, *_: object) -> bytes:
        """Bytes are pickled as text before protocol 3."""
        if not isinstance(text, str):
            return b""
        self._loading.make(len(text))
        return text.encode("latin1")

    def _laid(
        self, storage: object, offset: object, shape: object, strides: object, *_: object
    ) -> Laid:
        sizes = _sizes((offset,)), _sizes(shape), _sizes(strides)
        if not isinstance(storage, _Storage) or None in sizes:
            raise CheckpointError(f"{self._where}: a tensor has no storage or no shape: {_NEXT}")
        ((first,), lengths, steps) = cast("tuple[tuple[int, ...], ...]", sizes)
        last = first + sum((n - 1) * step for n, step in zip(lengths, steps, strict=True))
        entries = 1
        for length in lengths:
            entries *= length
        # A stride of 0 would let one stored number pass for a tensor of any size.
        if entries and (last >= storage.count or entries > storage.count):
            raise CheckpointError(
                f"{self._where}: a tensor of shape {list(lengths)} and strides {list(steps)} does not "
                f"fit its storage of {storage.count} numbers: {_NEXT}"
            )
        return Laid(storage, first, lengths, steps)


def _first(value: object, *_: object) -> object:
    """A parameter is its tensor, a `torch.Size` its tuple."""
    return value


def _made(kind: object, *_: object) -> object:
    """Objects are made by this function before protocol 2."""
    return kind() if isinstance(kind, type) and issubclass(kind, Inert) else Inert(kind)


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, tuple | list):
        return None
    items = cast("tuple[object, ...] | list[object]", value)
    if not all(type(item) is int and item >= 0 for item in items):
        return None
    return cast("tuple[int, ...]", tuple(items))
