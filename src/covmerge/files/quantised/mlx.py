"""Groups of a row with one scale and offset, as MLX stores them (mlx-lm; `metal` of transformers).

`X.weight` uint32 `(..., d_out, d_in · bits / 32)` has the inputs of a row one after another, the lowest
bits first. `X.scales` and `X.biases` (`X.qbiases` in `metal`) are `(..., d_out, groups)`, and
w = q · s + b. MLX rounds the product and the sum to the scales' dtype; transformers computes in float32.
The modes `mxfp4` and `mxfp8` have floating-point numbers, and one exponent for 32 of them in `X.scales`;
`nvfp4` has one E4M3 number for 16, also stored as a byte. Layers may have their own settings, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised.integers import BYTE, WORD, in_a_row, numbers, scales_of
from covmerge.files.quantised.packed import ByRows, Format, Found, Read, Stored

METHOD = "mlx"
METAL = "metal"
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (16, 32, 64, 128)
_UINT32 = (torch.uint32,)
_SCALES = (torch.bfloat16, torch.float16, torch.float32)
# Bits and group size of the modes without offsets.
_SMALL = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


@dataclass(frozen=True)
class Affine(ByRows):
    """A matrix, or a stack of matrices, whose groups have a scale and an offset.

    Attributes:
        bits: bits of a number.
        group: number of inputs with one scale.
        rounds: whether the product is rounded to the scales' dtype before the offset is added.
    """

    bits: int
    group: int
    rounds: bool

    def unpacked(self, rows: range, read: Read) -> Tensor:
        words, scales, offsets = (read(name, rows) for name in self.stored)
        codes = in_a_row(words.view(torch.int32).flatten(0, -2), self.bits)
        values = codes.view(len(codes), -1, self.group)
        dtype = scales.dtype if self.rounds else torch.float32
        scale, offset = (part.flatten(0, -2).unsqueeze(2).to(dtype) for part in (scales, offsets))
        found = values.to(dtype).mul_(scale).add_(offset)
        return found.float().view(len(rows), *self.header.shape[1:])


@dataclass(frozen=True)
class Small(ByRows):
    """A matrix, or a stack of matrices, of floating-point numbers with one scale per group.

    Attributes:
        bits: bits of a number.
        group: number of inputs with one scale.
        exponents: whether scales are powers of two; otherwise they are E4M3 numbers.
    """

    bits: int
    group: int
    exponents: bool

    def unpacked(self, rows: range, read: Read) -> Tensor:
        words, scales = (read(name, rows).flatten(0, -2) for name in self.stored)
        codes = words.view(torch.float8_e4m3fn if self.bits == BYTE else torch.uint8)
        values = numbers(codes, self.bits).view(len(codes), -1, self.group)
        scales = scales if self.exponents else scales.view(torch.float8_e4m3fn)
        return values.mul_(scales_of(scales).unsqueeze(2)).view(len(rows), *self.header.shape[1:])


def find(stored: Stored) -> Found:
    """Return the layers with `scales`; see `Found`."""
    modules = stored.modules(".scales")
    tensors = tuple(_weight(stored, module, _of_layer(stored, module)) for module in modules)
    kinds = dict.fromkeys(f"{tensor.bits} bit in groups of {tensor.group}" for tensor in tensors)
    return Found(tensors, f"MLX, {', '.join(kinds)}")


def _of_layer(stored: Stored, module: str) -> Mapping[str, Any]:
    """Return the settings of a layer: its own, or the common ones."""
    settings: object = stored.settings.get(module)
    return cast("dict[str, Any]", settings) if isinstance(settings, dict) else stored.settings


def _weight(stored: Stored, module: str, settings: Mapping[str, Any]) -> Affine | Small:
    metal = stored.method == METAL
    name, scales, offsets = (
        f"{module}.{leaf}" for leaf in ("weight", "scales", "qbiases" if metal else "biases")
    )
    mode = settings.get("mode", "affine")
    small = _SMALL.get(mode) if isinstance(mode, str) else None
    bits, group = small or (settings.get("bits"), settings.get("group_size"))
    if mode != "affine" and small is None:
        known = ", ".join(("affine", *_SMALL))
        stored.refuse(f"the mode of '{name}' is {shorten(mode)}, where {known} can be read")
    known = type(bits) is int and bits in _BITS and type(group) is int and group in _GROUPS
    if not known:
        stored.refuse(
            f"'{name}' has {shorten(bits)} bits in groups of {shorten(group)}, where "
            f"{', '.join(map(str, _BITS))} bits in groups of {', '.join(map(str, _GROUPS))} can be read"
        )
    assert isinstance(bits, int) and isinstance(group, int)
    shape = stored.part(name, _UINT32).shape
    columns = shape[-1] * WORD // bits if shape else 0
    if len(shape) not in (2, 3) or not prod(shape) or columns * bits != shape[-1] * WORD:
        stored.refuse(f"'{name}' is {list(shape)}, where whole words of {bits} bits can be read")
    if columns % group:
        stored.refuse(
            f"'{name}' has rows of {columns} numbers, where groups of {group} can be read"
        )
    grid = (*shape[:-1], columns // group)
    header = TensorHeader(name, (*shape[:-1], columns), stored.dtype)
    if small is not None:
        stored.part(scales, (torch.uint8,), grid)
        return Small(header, (name, scales), bits, group, exponents=mode != "nvfp4")
    dtype = stored.part(scales, _SCALES, grid).dtype
    stored.part(offsets, (dtype,), grid)
    return Affine(header, (name, scales, offsets), bits, group, rounds=not metal)


MLX = Format((METHOD, METAL), find, parts=(".scales", ".biases", ".qbiases"))
