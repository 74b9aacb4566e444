"""Packed tensors, and what a quantised format declares.

A tensor is unpacked in pieces of 2¹⁸ numbers, whatever is asked for. A read therefore takes a few MB beside
the tensor that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Packed, Read
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised.gguf_file import GgufSettings

PIECE = 2**18  # numbers that are unpacked at once
SMALLEST = 16  # least number of weights with one scale: a layer's scales are read as a whole

DTYPE_KEYS = ("dtype", "torch_dtype")  # keys of a config
_DTYPES = ("bfloat16", "float16", "float32")


def how_else(way: str) -> str:
    """Return the advice for a checkpoint that cannot be read: how to dequantise it, if there is a way."""
    if not way:
        return "pass the model as it was before it was quantised"
    return f"dequantise it first (transformers: {way}), or pass the model as it was before"


@dataclass(frozen=True)
class ByRows:
    """A packed tensor whose rows can be unpacked separately."""

    header: TensorHeader
    stored: tuple[str, ...]

    def fill(self, out: Tensor, rows: range, read: Read) -> None:
        for part in pieces(rows, prod(self.header.shape[1:])):
            start = part.start - rows.start
            out[start : start + len(part)] = self.unpacked(part, read)

    def unpacked(self, rows: range, read: Read) -> Tensor:
        """Return a few rows, in float32."""
        raise NotImplementedError


def pieces(rows: range, width: int) -> Iterator[range]:
    """Divide rows of `width` numbers into ranges of about `PIECE` numbers.

    Example:
        >>> list(pieces(range(1, 6), PIECE // 2))
        [range(1, 3), range(3, 5), range(5, 6)]
    """
    step = max(1, PIECE // max(1, width))
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a config states; bfloat16 if it states none."""
    return getattr(torch, next((name for name in _stated(config) if name in _DTYPES), "bfloat16"))


def _stated(config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the dtypes that a config, and its parts for text, state."""
    nested = [value for key, value in config.items() if key.endswith("text_config")]
    parts = [cast("Mapping[str, Any]", part) for part in nested if isinstance(part, dict)]
    for part in (config, *parts):
        yield from (part[key] for key in DTYPE_KEYS if part.get(key) not in (None, "auto"))


@dataclass(frozen=True)
class Stored:
    """A quantised checkpoint, as formats see it.

    Attributes:
        checkpoint: the checkpoint with its stored tensors.
        settings: its `quantization_config`.
        dtype: the dtype in which its config says that it is computed.
        dequantise: the way in which transformers dequantises it (`Format`).
    """

    checkpoint: Checkpoint
    settings: Mapping[str, Any]
    dtype: torch.dtype
    dequantise: str = ""

    @property
    def method(self) -> object:
        """The config's name of the format."""
        return self.settings.get("quant_method")

    def refuse(self, why: str, way: str | None = None) -> NoReturn:
        """Raise an error that says what cannot be read, and what to do: `way`, or how to dequantise."""
        declared = (
            "gguf"
            if isinstance(self.settings, GgufSettings)
            else f"{shorten(self.method)}; quantization_config in config.json"
        )
        raise CheckpointError(
            f"{self.checkpoint.source} is stored quantised ({declared}), and {why}: "
            + (way or how_else(self.dequantise))
        )

    def check_dtype(self) -> None:
        """Check that the dtype that the config states is one in which weights can be read."""
        stated = next(_stated(self.checkpoint.config or {}), "bfloat16")
        if stated not in _DTYPES:
            self.refuse(f"its dtype is {shorten(stated)}, where {', '.join(_DTYPES)} can be read")

    def check_local(self) -> None:
        """Check that the weights are local, for formats that store the layers' shapes among them."""
        hub = self.checkpoint.hub
        if hub is not None and self.checkpoint.folder is None:
            self.refuse(
                "the shapes of its layers lie among its weights",
                f"download it (`hf download {hub.name}`), and pass the folder",
            )

    def setting(self, key: str, *allowed: object, default: object = None) -> Any:
        """Return a setting, after checking that its value is one that can be read."""
        value = self.settings.get(key, default)
        if not any(type(value) is type(known) and value == known for known in allowed):
            self.refuse(
                f"its {key} is {shorten(value)}, where {', '.join(map(shorten, allowed))} can be read"
            )
        return value

    def version(self, usual: str, *others: str) -> str:
        """Return the version of the format, which a config may state under two keys."""
        keys = ("checkpoint_format", "format")
        first, second = (self.setting(key, usual, *others, None) for key in keys)
        if None not in (first, second) and first != second:
            self.refuse(f"its {keys[0]} is {first!r}, and its {keys[1]} {second!r}")
        return first or second or usual

    def group(self, default: int | None = None) -> int:
        """Return the number of inputs with one scale; -1: all of them."""
        value = self.settings.get("group_size", default)
        if type(value) is not int or not (value == -1 or SMALLEST <= value < 2**31):
            self.refuse(
                f"its group_size is {shorten(value)}, where -1, or {SMALLEST} or more, can be read"
            )
        return value

    def part(
        self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]
    ) -> TensorHeader:
        """Return the header of a packed tensor's part, after checking its dtype and shape."""
        header = self.checkpoint.headers.get(name)
        if header is None:
            self.refuse(f"'{name}' is missing")
        if header.dtype not in dtypes:
            self.refuse(f"'{name}' is {header.dtype}, not {' or '.join(map(str, dtypes))}")
        if shapes and header.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            self.refuse(f"'{name}' is {list(header.shape)}, where its layer needs {wanted}")
        return header

    def matrix(self, name: str, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
        """Return the sizes of a part that is a matrix, after checking its dtype."""
        shape = self.part(name, dtypes).shape
        if len(shape) != 2 or 0 in shape:
            self.refuse(f"'{name}' is {list(shape)}, where a matrix can be read")
        return shape[0], shape[1]

    def modules(self, end: str) -> list[str]:
        """Return the beginnings of all names that have this end."""
        names = self.checkpoint.headers
        return [name.removesuffix(end) for name in names if name.endswith(end)]


@dataclass(frozen=True)
class Found:
    """The packed tensors of a checkpoint, as its format found them.

    Attributes:
        tensors: the packed tensors.
        said: the format, as text.
        unused: stored tensors that plain weights do not need: scales of activations.
        config: the model's config, if it is made from the file's contents; None: it is that of config.json.
        turned: whether weights lie as transformers stores them, including those that it stores transposed.
    """

    tensors: tuple[Packed, ...]
    said: str
    unused: frozenset[str] = field(default_factory=frozenset[str])
    config: Mapping[str, Any] | None = None
    turned: bool = False


@dataclass(frozen=True)
class Format:
    """A quantised format, declared by its file.

    Attributes:
        names: the names of the format in a config's `quant_method`.
        find: the function that finds the packed tensors.
        parts: endings of names that only parts of packed tensors have.
        plain_modules: the key of `quantization_config` where the format's clients look for plain modules;
            "": there is none.
        dequantise: the way in which transformers dequantises it; "": there is none.
    """

    names: tuple[str, ...]
    find: Callable[[Stored], Found]
    parts: tuple[str, ...] = ()
    plain_modules: str = ""
    dequantise: str = ""
