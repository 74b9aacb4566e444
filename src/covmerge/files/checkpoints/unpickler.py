"""An unpickler that runs nothing that a pickle names.

It knows storages, torch's functions that build a tensor on a storage, and `OrderedDict`. Everything
else becomes an inert record of its arguments and its state. No module is imported for it, and
nothing is called.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pickle import UnpicklingError
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.files.checkpoints.base import check_unchanged
from covmerge.files.stores.store import Stamp, StoredFile

# Tensors as in a pickle: a storage, an offset, a shape and strides.


class _Fixed:
    """A base for objects given to a pickle: it refuses `__setstate__`, which could bypass freezing."""

    def __setstate__(self, state: object) -> None:
        raise UnpicklingError("the pickle sets the state of a tensor or of its storage")


@dataclass(frozen=True)
class Storage(_Fixed):
    """Numbers of one dtype in the file; `read(first, count)` reads some of them into fresh memory."""

    dtype: torch.dtype
    count: int
    read: Callable[[int, int], bytearray]


@dataclass(frozen=True)
class Laid(_Fixed):
    """A tensor described by a storage, an offset, a shape and strides."""

    origin: ClassVar[str] = "Tensor"

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its numbers."""
        return self.storage.dtype

    def tensor(self, rows: range | None = None) -> Tensor:
        """Read (rows of) the tensor into its own memory."""
        first, shape = self.offset, self.shape
        if rows is not None:
            first, shape = first + rows.start * self.strides[0], (len(rows), *shape[1:])
        # Read as bytes, stored booleans other than 0 and 1 stay as they are.
        dtype = torch.uint8 if self.dtype is torch.bool else self.dtype
        return self._read(first, shape, dtype).view(self.dtype)

    def _read(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read numbers with those between them; if these are most, as for rows of `w.T`, read halves."""
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        lengths = [(n - 1) * step for n, step in zip(shape, self.strides, strict=True)]
        spanned = sum(lengths) + 1
        if spanned * dtype.itemsize > _SPARSE and spanned > 2 * math.prod(shape):
            axis = lengths.index(max(lengths))
            half = shape[axis] // 2
            sizes = (half, first), (shape[axis] - half, first + half * self.strides[axis])
            halves = [
                self._read(start, (*shape[:axis], size, *shape[axis + 1 :]), dtype)
                for size, start in sizes
            ]
            return torch.cat(halves, axis)
        data = self.storage.read(first, spanned)
        return torch.as_strided(
            torch.frombuffer(data, dtype=dtype), shape, self.strides
        ).contiguous()


NEXT = "fetch the file again, or save the state dict with safetensors.torch.save_file where you trust it"

_SPARSE = 2**16  # bytes of a tensor that may be read with all that is between its numbers
_MAX_NAMES = 10_000  # of classes and functions; a module has some tens of them
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
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
# Dtypes without a storage class: torch builds such a tensor on the bytes of an untyped storage.
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
    """A class whose attributes a pickle cannot set; it stands for the class named `origin`."""

    origin: str

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"the pickle sets '{name}' of a class")


class Inert(metaclass=Sealed):
    """A stand-in for an object of any unknown class."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Create a record with the arguments."""
        made = super().__new__(cls)
        object.__setattr__(made, "args", args)
        object.__setattr__(made, "state", None)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: object

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        """Return another record with the arguments of the call."""
        return Inert(*args)

    def __setstate__(self, state: object) -> None:
        """Record the state."""
        object.__setattr__(self, "state", state)

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore a dict's entry: no tensor of a module is in such an entry."""

    def append(self, value: object) -> None:
        """Ignore a list's entry."""

    def extend(self, values: object) -> None:
        """Ignore a list's entries."""

    def add(self, value: object) -> None:
        """Ignore a set's entry."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Ordered(dict[object, object], metaclass=Sealed):
    """A stand-in for an `OrderedDict`, without its attributes, in which torch stores versions."""

    __slots__ = ()
    origin = "collections.OrderedDict"

    def __setstate__(self, state: object) -> None:
        """Ignore the attributes."""


class _Call:
    """A function of this module that a pickle may call but not change."""

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
    """The state of reading one file: its limits and the stand-ins for its classes."""

    where: str  # the path of the file
    size: int  # of the file in bytes
    # Bytes that may still be created; data may exist as text, then as bytes, then as numbers.
    left: int = field(init=False)
    # The stand-ins for classes and functions, by name.
    kinds: dict[str, type[Inert]] = field(default_factory=dict[str, "type[Inert]"])

    def __post_init__(self) -> None:
        self.left = 2 * self.size

    def make(self, size: int) -> None:
        """Count bytes that are about to be created, and raise if they are too many."""
        self.left -= size
        if self.left < 0:
            raise CheckpointError(f"{self.where} makes more bytes than it holds: {NEXT}")

    def kind(self, origin: str) -> type[Inert]:
        """Return the stand-in for a class or function."""
        if origin not in self.kinds:
            if len(self.kinds) == _MAX_NAMES:
                raise CheckpointError(
                    f"{self.where} names more than {_MAX_NAMES} classes and functions: {NEXT}"
                )
            self.kinds[origin] = Sealed("Inert", (Inert,), {"origin": origin})
        return self.kinds[origin]


StorageOf = Callable[[torch.dtype, str, int], Storage]


class Unpickler(pickle.Unpickler):
    """An unpickler that knows tensors and `OrderedDict`, and keeps records of everything else.

    `data` is one pickle, already checked. `storage` finds a storage by dtype, key and number of elements;
    `nested` reads a file that is stored as bytes inside the pickle.
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
        """Return a stand-in of this module; nothing is looked up or imported."""
        known: dict[str, Callable[..., object]] = {
            "torch._utils._rebuild_tensor": self._laid,
            "torch._utils._rebuild_tensor_v2": self._laid,
            "torch._utils._rebuild_tensor_v3": self._over_bytes,
            _OF_TYPE: self._of_type,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
            "torch.storage._load_from_bytes": self._whole,
            "torch.Size": _first,
            "copy_reg._reconstructor": _made,
            "_codecs.encode": self._latin,
            # A class inside a class, before protocol 4, such as a process group's in a ShardedTensor.
            "__builtin__.getattr": self._inner,
            "builtins.getattr": self._inner,
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
        """Return a tensor of a plain class, without extra attributes; of another class, return a record."""
        if isinstance(function, _Call) and getattr(kind, "origin", "") in _PLAIN:
            return function(*cast("tuple[object, ...]", arguments))
        return self._loading.kind(_OF_TYPE)(function, kind, arguments, *state)

    def _inner(self, owner: object, name: object, *_: object) -> object:
        """Return a stand-in for a class inside a class."""
        return self._loading.kind(name) if isinstance(name, str) else Inert(owner, name)

    def _whole(self, data: object) -> object:
        """Read a storage that was pickled as the bytes of a separate file."""
        if not isinstance(data, bytes):
            raise CheckpointError(f"{self._where}: a storage is no bytes: {NEXT}")
        self._loading.make(len(data))
        return self._nested(data, self._loading)

    def _latin(self, text: object, *_: object) -> bytes:
        """Return bytes from text: pickles before protocol 3 store bytes as text."""
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
        """Return a tensor on the bytes of a storage without a dtype."""
        dtype = _OVER_BYTES.get(getattr(kind, "origin", ""))
        if dtype is None or not isinstance(storage, Storage) or storage.dtype is not torch.uint8:
            raise CheckpointError(f"{self._where}: a tensor has no bytes or no dtype: {NEXT}")
        size, read = dtype.itemsize, storage.read

        def numbers(first: int, wanted: int) -> bytearray:
            return read(first * size, wanted * size)

        whole = Storage(dtype, storage.count // size, numbers)
        return self._laid(whole, offset, shape, strides)

    def _laid(
        self,
        storage: object,
        offset: object,
        shape: object,
        strides: object,
        gradient: object = None,
        hooks: object = None,
        changes: object = None,
    ) -> Laid:
        if changes:
            raise CheckpointError(f"{self._where}: a tensor is stored as {changes}: {NEXT}")
        sizes = numbers((offset,)), numbers(shape), numbers(strides)
        if not isinstance(storage, Storage) or None in sizes:
            raise CheckpointError(f"{self._where}: a tensor has no storage or no shape: {NEXT}")
        ((first,), lengths, steps) = cast("tuple[tuple[int, ...], ...]", sizes)
        last = first + sum((n - 1) * step for n, step in zip(lengths, steps, strict=True))
        entries = math.prod(lengths)
        if entries and last >= storage.count:
            raise CheckpointError(
                f"{self._where}: a tensor of shape {list(lengths)} and strides {list(steps)} does not "
                f"fit its storage of {storage.count} numbers: {NEXT}"
            )
        # A stride of 0 makes one stored number look like a tensor of any size, which a read would copy.
        if entries * storage.dtype.itemsize > self._loading.size:
            raise CheckpointError(
                f"{self._where}: a tensor of shape {list(lengths)} takes "
                f"{entries * storage.dtype.itemsize} bytes, and the whole file has {self._loading.size}: "
                f"{NEXT}"
            )
        return Laid(storage, first, lengths, steps)


def _first(value: object, *_: object) -> object:
    """Return the first argument: a parameter is its tensor, a `torch.Size` its tuple."""
    return value


def _made(kind: object, *_: object) -> object:
    """Return a record of an object; pickles before protocol 2 create objects by this function."""
    return kind() if isinstance(kind, type) and issubclass(kind, Inert) else Inert(kind)


def whole_booleans(tensor: Tensor, what: str) -> Tensor:
    """Return a tensor unchanged after checking that its booleans are stored as 0 and 1.

    Raises:
        CheckpointError: a boolean is stored as another byte, which torch's operations treat
            inconsistently.
    """
    is_bool = tensor.dtype is torch.bool and tensor.numel() > 0
    if is_bool and int(tensor.view(torch.uint8).max()) > 1:
        raise CheckpointError(
            f"{what} is of bool and holds bytes other than 0 and 1: save it again"
        )
    return tensor


# Helpers for pickled files of a training's ranks, read as records.


@dataclass(frozen=True)
class LaidPart:
    """A tensor in the pickled file of one rank; calling it reads rows."""

    file: StoredFile
    stamp: Stamp
    name: str
    laid: Laid

    def __call__(self, rows: range | None) -> Tensor:
        """Read some rows, or all rows for None."""
        check_unchanged(self.file, self.stamp, self.file.stamp())
        return whole_booleans(self.laid.tensor(rows), f"{self.file}: '{self.name}'")

    def within(self, starts: Sequence[int], shape: Sequence[int]) -> LaidPart:
        """Return a part of the tensor, from its place along each axis."""
        steps = (start * step for start, step in zip(starts, self.laid.strides, strict=True))
        laid = replace(self.laid, offset=self.laid.offset + sum(steps), shape=tuple(shape))
        return replace(self, laid=laid)


def attributes(value: object) -> Mapping[object, object]:
    """Return the attributes in a record's state, which may also contain slots."""
    state = value.state if isinstance(value, Inert) else value
    for one in (state, *listed(state)):
        if isinstance(one, Mapping):
            return cast("Mapping[object, object]", one)
    return {}


def listed(value: object) -> Sequence[object]:
    """Return the items of a list or tuple; nothing for other values."""
    return cast("Sequence[object]", value) if isinstance(value, tuple | list) else ()


def numbers(value: object) -> tuple[int, ...] | None:
    """Return a list or tuple of sizes as a tuple, or None for other values."""
    items = listed(value)
    fits = isinstance(value, tuple | list) and all(type(n) is int and 0 <= n < 2**62 for n in items)
    return tuple(cast("Sequence[int]", items)) if fits else None


def kind_of(value: object) -> str:
    """Return the name of a class or of a value's class, without its module, which changes with releases."""
    return origin_of(value).rpartition(".")[2]


def origin_of(value: object) -> str:
    """Return the name of a class or of a value's class, as in the pickle."""
    return getattr(value, "origin", type(value).__name__)
