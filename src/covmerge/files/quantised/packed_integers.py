"""Integers of 4 or 8 bits in int32 words, as compressed-tensors packs them (`pack-quantized`: W4A16).

`X.weight_packed` `(d_out, d_in · bits / 32)` has the inputs of a row one after another, the lowest bits
first, each 2^(bits − 1) more than it stands for; `X.weight_scale` is `(d_out, groups)`, and
`X.weight_shape` has the two sizes of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised.gptq import said_of_groups
from covmerge.files.quantised.integers import WORD, in_a_row
from covmerge.files.quantised.packed import SMALLEST, ByRows, Found, Read, Stored

_BITS = (4, 8)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_NOT_READ = ("weight_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class Words(ByRows):
    """A matrix of integers times the scale of their group.

    Attributes:
        bits: of an integer.
        group: inputs that have one scale.
    """

    bits: int
    group: int

    def unpacked(self, rows: range, read: Read) -> Tensor:
        numbers = in_a_row(read(self.stored[0], rows), self.bits)
        numbers = numbers[:, : self.header.shape[1]].float().sub_(2 ** (self.bits - 1))
        scales = read(self.stored[1], rows).float()
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.group, 1)[:, : numbers.shape[1]]
        return numbers.mul_(scales)


def find(stored: Stored, schemes: Sequence[Mapping[str, Any]]) -> Found:
    """Find layers with `weight_packed`; see `Found`.

    Args:
        stored: the checkpoint.
        schemes: what its config says of the weights of each group of layers.

    Raises:
        CheckpointError: integers that are not read, or sizes that contradict each other.
    """
    groups = [None if own.get("group_size") == -1 else own.get("group_size") for own in schemes]
    sizes = {
        (own.get("num_bits"), own.get("type", "int"), group)
        for own, group in zip(schemes, groups, strict=True)
    }
    if len(sizes) != 1:
        stored.refuse(f"its layers are of {len(sizes)} kinds, where one can be read")
    ((bits, kind, group),) = sizes
    if bits not in _BITS or kind != "int":
        stored.refuse(f"its weights are {shorten(kind)} of {shorten(bits)} bits, not int of 4 or 8")
    if group is not None and not (type(group) is int and SMALLEST <= group < 2**31):
        stored.refuse(f"its group_size is {shorten(group)}, where {SMALLEST} or more can be read")
    if any(own.get("strategy") == "block" for own in schemes):
        stored.refuse(
            "strategy of its weights is 'block', where tensor, channel or group can be read"
        )
    names = [name for name in stored.checkpoint.headers if name.endswith(".weight_packed")]
    tensors = tuple(_weight(stored, n.removesuffix("_packed"), bits, group) for n in names)
    for tensor in tensors:
        check_zeros(stored, schemes, f"{tensor.header.name}_zero_point")
    return Found(tensors, f"compressed-tensors, INT{bits}, {said_of_groups(group or -1)}")


def check_zeros(stored: Stored, schemes: Sequence[Mapping[str, Any]], name: str) -> None:
    """See that a weight without zero points is one of a symmetric scheme.

    Raises:
        CheckpointError: all schemes have zero points.
    """
    if schemes and all(scheme.get("symmetric") is False for scheme in schemes):
        stored.refuse(f"its weights are asymmetric, and '{name}' is missing")


def _weight(stored: Stored, name: str, bits: int, group: int | None) -> Words:
    words, scale, shape = (f"{name}_{leaf}" for leaf in ("packed", "scale", "shape"))
    packed = stored.part(words, (torch.int32,)).shape
    if len(packed) != 2 or 0 in packed:
        stored.refuse(f"'{words}' is {list(packed)}, where a matrix can be read")
    for leaf in _NOT_READ:
        other = f"{name.rpartition('.')[0]}.{leaf}"
        if other in stored.checkpoint.headers:
            stored.refuse(f"'{other}' is there, where symmetric weights in order can be read")
    rows, columns = packed[0], packed[1] * WORD // bits
    grid = stored.part(scale, _SCALES).shape
    if group is not None and len(grid) == 2:
        columns = min(columns, grid[1] * group)
    groups = 1 if group is None else -(-columns // group)
    stored.part(scale, _SCALES, (rows, groups))
    stored.part(shape, (torch.int64, torch.int32), (2,))
    if -(-columns * bits // WORD) != packed[1]:
        stored.refuse(f"'{words}' is {list(packed)}, and its scales are of {columns} inputs")
    if stored.checkpoint.folder is not None:
        said = [int(size) for size in stored.checkpoint.read(shape)]
        if said != [rows, columns]:
            stored.refuse(f"'{shape}' says {said}, and its layer is {[rows, columns]}")
    header = TensorHeader(name, (rows, columns), stored.dtype)
    return Words(header, (words, scale, shape), bits, group or columns)
