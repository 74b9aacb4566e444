"""An unpickler that runs nothing of what a pickle names.

It knows storages, torch's functions that lay a tensor over a storage, and `OrderedDict`. Whatever else is
named becomes an inert record of its arguments and its state: no module is imported for it and nothing is
called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.files.checkpoints.base import check_unchanged
from covmerge.files.stores.store import Stamp, stamp_of

# Tensors as a pickle describes them: laid over a storage, by shape and strides.


class _Fixed:
    """What a pickle is given, and cannot change: it could set `__dict__` past what keeps others out."""

    def __setstate__(self, state: object) -> None:
        raise UnpicklingError("the pickle sets the state of a tensor or of its storage")


@dataclass(frozen=True)
class Storage(_Fixed):
    """Numbers of one dtype in the file; `read(first, count)` returns the bytes of some of them.

    `start` is the byte of the file at which they begin, where they lie in it as they are.
    """

    dtype: torch.dtype
    count: int
    read: Callable[[int, int], bytes]
    start: int | None = None


@dataclass(frozen=True)
class Laid(_Fixed):
    """A tensor that is laid over a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its numbers."""
        return self.storage.dtype

    def span(self, rows: range | None = None) -> tuple[int, tuple[int, ...], int]:
        """Return where (rows of) it begin in the storage, their shape, and how many numbers they span."""
        first, shape = self.offset, self.shape
        if rows is not None:
            first, shape = first + rows.start * self.strides[0], (len(rows), *shape[1:])
        spanned = sum((n - 1) * step for n, step in zip(shape, self.strides, strict=True)) + 1
        return first, shape, spanned

    def tensor(self, rows: range | None = None) -> Tensor:
        """Read (rows of) it into memory of its own, and of its storage what lies between."""
        first, shape, spanned = self.span(rows)
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        data = bytearray(self.storage.read(first, spanned))
        # As bytes, truth values stay as they are stored, whatever they are.
        dtype = torch.uint8 if self.dtype is torch.bool else self.dtype
        laid = torch.as_strided(torch.frombuffer(data, dtype=dtype), shape, self.strides)
        return laid.clone(memory_format=torch.contiguous_format).view(self.dtype)


NEXT = "fetch the file again, or save the state dict with safetensors.torch.save_file where you trust it"

_MAX_NAMES = 10_000  # of classes and functions; a module has some tens
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")
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
# Dtypes that have no class of storage: torch lays such a tensor over the bytes of an untyped one.
_UNTYPED = "torch.storage.UntypedStorage"
_OVER_BYTES = {
    f"torch.{name}": dtype
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "uint16",
        "uint32",
        "uint64",
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
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


class Ordered(dict[object, object], metaclass=Sealed):
    """What stands in for an `OrderedDict`, without its attributes: torch keeps versions in them."""

    __slots__ = ()
    origin = "collections.OrderedDict"

    def __setstate__(self, state: object) -> None:
        """Let them go by."""


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


@dataclass
class Loading:
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
        """Count bytes that are about to be made."""
        self.left -= size
        if self.left < 0:
            raise CheckpointError(f"{self.where} makes more bytes than it holds: {NEXT}")

    def kind(self, origin: str) -> type[Inert]:
        """Return the stand-in of a class or function."""
        if origin not in self.kinds:
            if len(self.kinds) == _MAX_NAMES:
                raise CheckpointError(
                    f"{self.where} names more than {_MAX_NAMES} classes and functions: {NEXT}"
                )
            self.kinds[origin] = Sealed("Inert", (Inert,), {"origin": origin})
        return self.kinds[origin]


StorageOf = Callable[[torch.dtype, str, int], Storage]


class Unpickler(pickle.Unpickler):
    """Knows tensors and `OrderedDict`; of everything else it keeps a record.

    Args:
        data: one pickle, looked through before.
        loading: the file it is of.
        storage: finds a storage by dtype, key and count.
        nested: reads a file that is stored as bytes in the pickle.
    """

    def __init__(
        self,
        data: bytes,
        loading: Loading,
        storage: StorageOf,
        nested: Callable[[bytes, Loading], object],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._nested = nested
        self._loading = loading
        self._where = loading.where
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return our own stand-in; nothing is looked up and nothing is imported."""
        known: dict[str, Callable[..., object]] = {
            "torch._utils._rebuild_tensor": self._laid,
            "torch._utils._rebuild_tensor_v2": self._laid,
            "torch._utils._rebuild_tensor_v3": self._over_bytes,
            _OF_TYPE: self._of_type,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            "torch.storage._load_from_bytes": self._whole,
            "torch.Size": _first,
            "copy_reg._reconstructor": _made,
            "_codecs.encode": self._latin,
        }
        origin = f"{module_name}.{global_name}"
        if origin == "collections.OrderedDict":
            return Ordered
        if origin in known:
            return _Call(known[origin])
        if origin == _UNTYPED:
            return torch.uint8
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
            f"{self._where} has a storage that is not of one of {', '.join(_DTYPES)}: {NEXT}"
        )

    def _of_type(self, function: object, kind: object, arguments: object, *state: object) -> object:
        """A tensor of a class, or with attributes of its own, which are left out of a plain one."""
        if isinstance(function, _Call) and getattr(kind, "origin", "") in _PLAIN:
            return function(*cast("tuple[object, ...]", arguments))
        return self._loading.kind(_OF_TYPE)(function, kind, arguments, *state)

    def _whole(self, data: object) -> object:
        """A storage that was pickled as the bytes of a file of its own."""
        if not isinstance(data, bytes):
            raise CheckpointError(f"{self._where}: a storage is no bytes: {NEXT}")
        self._loading.make(len(data))
        return self._nested(data, self._loading)

    def _latin(self, text: object, *_: object) -> bytes:
        """Bytes are pickled as text before protocol 3."""
        if not isinstance(text, str):
            return b""
        self._loading.make(len(text))
        return text.encode("latin1")

    def _over_bytes(
        self,
        storage: object,
        offset: object,
        shape: object,
        strides: object,
        gradient: object = None,
        hooks: object = None,
        kind: object = None,
        *_: object,
    ) -> Laid:
        """A tensor over the bytes of a storage that has no dtype of its own."""
        dtype = _OVER_BYTES.get(getattr(kind, "origin", ""))
        if (
            dtype is None
            or not isinstance(storage, Storage)
            or storage.dtype is not torch.uint8
            or storage.count % dtype.itemsize
        ):
            raise CheckpointError(f"{self._where}: a tensor has no bytes or no dtype: {NEXT}")
        size, read = dtype.itemsize, storage.read

        def numbers(first: int, wanted: int) -> bytes:
            return read(first * size, wanted * size)

        whole = Storage(dtype, storage.count // size, numbers, storage.start)
        return self._laid(whole, offset, shape, strides)

    def _laid(
        self, storage: object, offset: object, shape: object, strides: object, *_: object
    ) -> Laid:
        sizes = _sizes((offset,)), _sizes(shape), _sizes(strides)
        if not isinstance(storage, Storage) or None in sizes:
            raise CheckpointError(f"{self._where}: a tensor has no storage or no shape: {NEXT}")
        ((first,), lengths, steps) = cast("tuple[tuple[int, ...], ...]", sizes)
        last = first + sum((n - 1) * step for n, step in zip(lengths, steps, strict=True))
        entries = 1
        for length in lengths:
            entries *= length
        # A stride of 0 would let one stored number pass for a tensor of any size.
        if entries and (last >= storage.count or entries > storage.count):
            raise CheckpointError(
                f"{self._where}: a tensor of shape {list(lengths)} and strides {list(steps)} does not "
                f"fit its storage of {storage.count} numbers: {NEXT}"
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


def whole_booleans(tensor: Tensor, what: str) -> Tensor:
    """Return a tensor whose truth values are stored as 0 and 1.

    Raises:
        CheckpointError: one is another byte, of which torch's operations make different things.
    """
    is_bool = tensor.dtype is torch.bool and tensor.numel() > 0
    if is_bool and int(tensor.view(torch.uint8).max()) > 1:
        raise CheckpointError(
            f"{what} is of bool and holds bytes other than 0 and 1: save it again"
        )
    return tensor


# What the pickled files of a training's ranks have in common, once they are read as records.


@dataclass(frozen=True)
class LaidPart:
    """A tensor in a pickled file of one rank, of which rows are read."""

    path: Path
    stamp: Stamp
    name: str
    laid: Laid

    def __call__(self, rows: range | None) -> Tensor:
        """Read some rows, all for None."""
        check_unchanged(self.path, self.stamp, stamp_of(self.path.stat()))
        return whole_booleans(self.laid.tensor(rows), f"{self.path}: '{self.name}'")

    def within(self, start: int, stop: int) -> LaidPart:
        """Return a part of a flat one."""
        laid = replace(
            self.laid, offset=self.laid.offset + start * self.laid.strides[0], shape=(stop - start,)
        )
        return replace(self, laid=laid)


def attributes(value: object) -> Mapping[object, object]:
    """Return what a record keeps as its attributes, alone or beside those of its slots."""
    state = value.state if isinstance(value, Inert) else value
    for one in (state, *listed(state)):
        if isinstance(one, Mapping):
            return cast("Mapping[object, object]", one)
    return {}


def listed(value: object) -> Sequence[object]:
    """Return a list's or a tuple's items, of anything else none."""
    return cast("Sequence[object]", value) if isinstance(value, tuple | list) else ()


def numbers(value: object) -> tuple[int, ...] | None:
    """Return sizes, or None for anything else."""
    items = listed(value)
    fits = isinstance(value, tuple | list) and all(type(n) is int and 0 <= n < 2**62 for n in items)
    return tuple(cast("Sequence[int]", items)) if fits else None


def kind_of(value: object) -> str:
    """Return the name of a class, or of a value's class; its module changes with releases."""
    if isinstance(value, Sealed):
        return value.origin.rpartition(".")[2]
    return (
        type(value).origin.rpartition(".")[2] if isinstance(value, Inert) else type(value).__name__
    )
