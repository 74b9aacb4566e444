"""Tensors out of pickled modules, without running anything that the pickle names.

`torch.save(module)` and `pickle.dump(module)` store a program: which classes to make, which functions
to call. It is read here by an unpickler that knows storages, torch's functions that lay a tensor over a
storage, and `OrderedDict`. Whatever else is named becomes an inert record of its arguments and its state:
no module is imported for it and nothing is called. The tree of `_modules` then has the tensors, under the
names of a state dict.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors_torch
from torch import Tensor

from covmerge.errors import CheckpointError

# Its annotations are partial.
_safetensors: Any = safetensors_torch

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # torch's own, at the start of its format from before 1.6
_MAX_PICKLE_BYTES = 100_000_000
_MAX_WHOLE_BYTES = 4 * 2**30  # formats without an index, which have to be read whole
_MAX_DEPTH = 100  # of modules in modules
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


class _Sealed(type):
    """A class whose attributes a pickle cannot set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"the pickle sets '{name}' of a class")


class Inert(metaclass=_Sealed):
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
    """Numbers of one dtype in the file, `read` when they are asked for."""

    dtype: torch.dtype
    count: int
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Laid:
    """A tensor that is laid over a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Read it into memory of its own."""
        data = bytearray(self.storage.read())
        numbers = torch.frombuffer(data, dtype=self.storage.dtype) if data else _nothing(self)
        return torch.as_strided(numbers, self.shape, self.strides, self.offset).clone(
            memory_format=torch.contiguous_format
        )


def _nothing(laid: Laid) -> Tensor:
    return torch.empty(0, dtype=laid.storage.dtype)


def convert(file: Path, out: Path) -> dict[str, Tensor]:
    """Write the tensors of a pickled module, or of a pickled state dict, as safetensors.

    Args:
        file: of `torch.save` (of any version) or `pickle.dump`.
        out: the safetensors file; it appears when it is whole.

    Returns:
        The tensors by name, as `module.state_dict()` would name them.

    Raises:
        CheckpointError: the file holds no tensors, is damaged, or promises more than it holds.
    """
    tensors = read_tensors(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.partial")
    try:
        _safetensors.save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return tensors


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled module or state dict by name; see `convert`."""
    where = str(file)
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(_ZIP_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
    try:
        if magic == _ZIP_MAGIC:
            with zipfile.ZipFile(file) as archive:
                return _tensors(_load_archive(archive, where), where)
        if file.stat().st_size > _MAX_WHOLE_BYTES:
            raise CheckpointError(
                f"{where} is in a format that has to be read whole, and is larger than "
                f"{_MAX_WHOLE_BYTES} bytes: {_NEXT}"
            )
        return _tensors(_load_bytes(file.read_bytes(), where), where)
    except CheckpointError:
        raise
    except Exception as error:  # hostile bytes make zipfile and the unpickler raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{where} cannot be read as a pickled module ({type(error).__name__}: {reason}): {_NEXT}"
        ) from error


# From the tree of records to named tensors


def _tensors(root: object, where: str) -> dict[str, Tensor]:
    laid = dict(_named(root, "", where, 0))
    if not laid:
        kind = root.origin if isinstance(root, Inert) else type(root).__name__
        raise CheckpointError(
            f"{where} holds a {kind} without parameters, not a module or a state dict: is it the "
            "right file?"
        )
    return {name: tensor.tensor() for name, tensor in laid.items()}


def _named(value: object, prefix: str, where: str, depth: int) -> Iterator[tuple[str, Laid]]:
    """Yield the tensors of a module's record or of a state dict, named as torch names them."""
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where}: modules in modules without end at '{prefix}': {_NEXT}")
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            if isinstance(key, str) and isinstance(item, Laid):
                yield key, item
        return
    state = value.state if isinstance(value, Inert) else None
    if not isinstance(state, Mapping):
        return
    state = cast("Mapping[object, object]", state)
    skipped = _left_out(state)
    for part in ("_parameters", "_buffers"):
        for name, item in _entries(state, part):
            if item is None or (part == "_buffers" and name in skipped):
                continue
            if not isinstance(item, Laid):
                raise CheckpointError(
                    f"{where}: '{prefix}{name}' is a {_kind(item)}, not a plain tensor: {_NEXT}"
                )
            yield f"{prefix}{name}", item
    for name, item in _entries(state, "_modules"):
        yield from _named(item, f"{prefix}{name}.", where, depth + 1)


def _entries(state: Mapping[object, object], part: str) -> Iterator[tuple[str, object]]:
    content = state.get(part)
    if isinstance(content, Mapping):
        for name, item in cast("Mapping[object, object]", content).items():
            if isinstance(name, str):
                yield name, item


def _left_out(state: Mapping[object, object]) -> set[object]:
    """Names of the buffers that a state dict does not have. A set is pickled as a call of `set`."""
    found = state.get("_non_persistent_buffers_set")
    if isinstance(found, Inert) and found.args and isinstance(found.args[0], list):
        return {item for item in cast("list[object]", found.args[0]) if isinstance(item, str)}
    return cast("set[object]", found) if isinstance(found, set) else set()


def _kind(value: object) -> str:
    return value.origin if isinstance(value, Inert) else type(value).__name__


# The formats


def _load_archive(archive: zipfile.ZipFile, where: str) -> object:
    """A zip of torch: `*/data.pkl`, and a member `*/data/KEY` for each storage."""
    found = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
    if len(found) != 1:
        raise CheckpointError(f"{where} has {len(found)} members data.pkl, not one: {_NEXT}")
    if any(entry.filename.endswith("/constants.pkl") for entry in archive.infolist()):
        raise CheckpointError(f"{where} is TorchScript, which is code: {_NEXT}")
    if found[0].file_size > _MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{where}: {found[0].filename} has {found[0].file_size} bytes, and the most that is read "
            f"is {_MAX_PICKLE_BYTES}: {_NEXT}"
        )
    folder = found[0].filename.removesuffix("data.pkl")

    def storage(dtype: torch.dtype, key: str, count: int) -> _Storage:
        member = f"{folder}data/{key}"
        try:
            entry = archive.getinfo(member)
        except KeyError:
            raise CheckpointError(f"{where} has no member {member}: {_NEXT}") from None
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{where}: {member} is compressed, as torch never does: {_NEXT}")
        # What the file really has, not what it says, decides how much is allocated.
        if not entry.compress_size == entry.file_size == count * dtype.itemsize:
            raise CheckpointError(
                f"{where}: {member} holds {entry.compress_size} bytes, and {count} numbers of {dtype} "
                f"take {count * dtype.itemsize}: {_NEXT}"
            )
        return _Storage(dtype, count, lambda: archive.read(entry))

    return _unpickle(archive.read(found[0]), where, storage)


def _load_bytes(data: bytes, where: str) -> object:
    """Torch's format from before 1.6, or a plain pickle."""
    stream = io.BytesIO(data)
    first = _next_pickle(stream, where)
    found = _unpickle(first, where, _no_storage(where))
    if found != _LEGACY_MAGIC:
        return found
    for _ in ("protocol", "system"):
        _next_pickle(stream, where)
    declared: dict[str, _Storage] = {}
    places: dict[str, bytes] = {}

    def storage(dtype: torch.dtype, key: str, count: int) -> _Storage:
        return declared.setdefault(key, _Storage(dtype, count, lambda: places[key]))

    content = _unpickle(_next_pickle(stream, where), where, storage)
    keys = _unpickle(_next_pickle(stream, where), where, _no_storage(where))
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


def _unpickle(data: bytes, where: str, storage: _StorageOf) -> object:
    return _Unpickler(_next_pickle(io.BytesIO(data), where), where, storage).load()


class _Unpickler(pickle.Unpickler):
    """Knows tensors and `OrderedDict`; of everything else it keeps a record."""

    def __init__(self, data: bytes, where: str, storage: _StorageOf) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
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
            "_codecs.encode": _latin,
        }
        origin = f"{module_name}.{global_name}"
        if origin == "collections.OrderedDict":
            return OrderedDict
        if origin in known:
            return _Call(known[origin])
        if module_name == "torch" and global_name in _DTYPES:
            return _DTYPES[global_name]
        return _Sealed("Inert", (Inert,), {"origin": origin})

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
        return _load_bytes(data, self._where)

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


def _latin(text: object, *_: object) -> bytes:
    """Bytes are pickled as text before protocol 3."""
    return text.encode("latin1") if isinstance(text, str) else b""


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, tuple | list):
        return None
    items = cast("tuple[object, ...] | list[object]", value)
    if not all(type(item) is int and item >= 0 for item in items):
        return None
    return cast("tuple[int, ...]", tuple(items))
