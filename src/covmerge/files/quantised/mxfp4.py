"""MXFP4, as GPT-OSS stores the experts of its layers (OCP Microscaling Formats 1.0).

`X_blocks` `(experts, d_out, groups, 16)` has two 4-bit numbers per byte, the low half first. `X_scales`
`(experts, d_out, groups)` has the exponent e of each group of 32: w = v · 2^(e − 127), with v an E2M1
number. The plain tensor `X` is transposed, `(experts, d_in, d_out)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.integers import numbers, scales_of
from covmerge.files.quantised.packed import Format, Found, Read, Stored, pieces

_BYTES = 16  # bytes of a group
GROUP = 2 * _BYTES


@dataclass(frozen=True)
class Experts:
    """The matrices of several experts; the smallest part that is read is one packed expert."""

    header: TensorHeader
    stored: tuple[str, ...]

    def fill(self, out: Tensor, rows: range, read: Read) -> None:
        _, d_in, d_out = self.header.shape
        for place, expert in enumerate(rows):
            only = range(expert, expert + 1)
            blocks, scales = (read(name, only)[0] for name in self.stored)
            for part in pieces(range(d_out), d_in):
                piece = slice(part.start, part.stop)
                out[place, :, piece] = _unpacked(blocks[piece], scales[piece]).mT


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return rows of one matrix `(rows, groups, 16)` times their scales, as `(rows, d_in)`."""
    values = numbers(blocks.flatten(1), 4).view(len(blocks), -1, GROUP)
    return values.mul_(scales_of(scales).unsqueeze(-1)).flatten(1)


def find(stored: Stored) -> Found:
    """Return the tensors stored as `_blocks` and `_scales`; see `Found`."""
    tensors = tuple(_experts(stored, name) for name in stored.modules("_blocks"))
    return Found(tensors, "MXFP4, an exponent for 32 weights")


def _experts(stored: Stored, name: str) -> Experts:
    parts = (f"{name}_blocks", f"{name}_scales")
    shape = stored.part(parts[0], (torch.uint8,)).shape
    if len(shape) != 4 or shape[3] != _BYTES or 0 in shape:
        stored.refuse(f"'{parts[0]}' is {list(shape)}, not (experts, d_out, groups, {_BYTES})")
    stored.part(parts[1], (torch.uint8,), shape[:3])
    experts, d_out, groups, _ = shape
    return Experts(TensorHeader(name, (experts, groups * GROUP, d_out), stored.dtype), parts)


GPT_OSS = Format(
    ("mxfp4",),
    find,
    parts=("_blocks",),
    plain_modules="modules_to_not_convert",
    dequantise="from_pretrained(FOLDER, quantization_config=Mxfp4Config(dequantize=True)), then "
    "save_pretrained(NEW)",
)
