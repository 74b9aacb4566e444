"""HQQ (Half-Quadratic Quantization), as transformers stores its state.

A weight is stored as a matrix of groups, which are its rows (axis 1) or its columns (axis 0). This matrix
is cut into slabs of equal height. A word of `X.W_q` holds the numbers at the same place of all slabs, the
first slab in the highest bits. w = (q − z) · s, with z and s of a group in `X.zero` and `X.scale`; each
step is rounded to their dtype, as HQQ computes. Sizes are stored as tensors beside them, so the weights
must be local.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.packed import SMALLEST, ByRows, Format, Found, Read, Stored

# By bits: the dtype of words, the number of slabs in a word, and their distance in bits; 5 and 6 bits
# take a byte.
_WORDS = {
    **{bits: (torch.uint8, 8 // bits, bits) for bits in (1, 2, 4, 8)},
    3: (torch.int32, 10, 3),
    **{bits: (torch.uint8, 1, 8) for bits in (5, 6)},
}
_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_SIZES = (torch.int32, torch.int64, torch.uint8)
_OTHERWISE = ("quant_scale", "quant_zero", "view_as_float")  # other ways to store words and scales
_BESIDE = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "compute_dtype"),
    *("channel_wise", "optimize", "round_zero", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", *_OTHERWISE),
)


@dataclass(frozen=True)
class Weight(ByRows):
    """The packed weight of a layer; its elements in order are the rows of the matrix of groups.

    Attributes:
        bits: bits of a number.
        width: width of the matrix of groups.
        height: number of rows of a slab.
        shifts: the place of each slab's number in a word, in bits.
        across: whether groups are columns of the matrix of groups; otherwise they are rows.
    """

    bits: int
    width: int
    height: int
    shifts: tuple[int, ...]
    across: bool

    def unpacked(self, rows: range, read: Read) -> Tensor:
        columns = self.header.shape[1]
        first, last = rows.start * columns, rows.stop * columns
        held = range(first // self.width, -(-last // self.width))
        scales, zeros = (read(name, None if self.across else held) for name in self.stored[1:])
        values = self._numbers(held, read).to(scales.dtype).sub_(zeros).mul_(scales)
        start = held.start * self.width
        return values.view(-1)[first - start : last - start].float().view(len(rows), columns)

    def _numbers(self, held: range, read: Read) -> Tensor:
        found: list[Tensor] = []
        for slab, shift in enumerate(self.shifts):
            top = slab * self.height
            part = range(max(held.start, top) - top, min(held.stop, top + self.height) - top)
            if part:
                found.append(read(self.stored[0], part) >> shift & (2**self.bits - 1))
        return torch.cat(found)


def find(stored: Stored) -> Found:
    """Return the layers with `W_q`; see `Found`."""
    stored.check_local()
    headers, modules = stored.checkpoint.headers, stored.modules(".W_q")
    tensors = tuple(_weight(stored, module) for module in modules)
    kinds = dict.fromkeys(f"{tensor.bits} bit" for tensor in tensors)
    names = (f"{module}.{leaf}" for module in modules for leaf in _BESIDE)
    return Found(tensors, f"HQQ, {', '.join(kinds)}", frozenset(n for n in names if n in headers))


def _weight(stored: Stored, module: str) -> Weight:
    for leaf in _OTHERWISE:
        if f"{module}.{leaf}" in stored.checkpoint.headers and any(_sizes(stored, module, leaf)):
            stored.refuse(f"'{module}.{leaf}' is not 0, where plain words and scales can be read")
    bits, group, axis = (_sizes(stored, module, n)[0] for n in ("nbits", "group_size", "axis"))
    rows, columns = _sizes(stored, module, "shape", 2)
    whole = all(0 < size < 2**31 for size in (rows, columns))
    known = bits in _WORDS and SMALLEST <= group < 2**31 and axis in (0, 1)
    if not whole or not known or rows * columns % group:
        stored.refuse(
            f"'{module}.W_q' has {bits} bits, groups of {group} along axis {axis}, and the shape "
            f"{[rows, columns]}, where {', '.join(map(str, sorted(_WORDS)))} bits in whole groups of "
            f"{SMALLEST} or more can be read"
        )
    dtype, count, apart = _WORDS[bits]
    groups = rows * columns // group
    high, width = (groups, group) if axis else (group, groups)
    height = -(-high // count)
    if bits != 3 and high % count:
        stored.refuse(
            f"'{module}.W_q' has {high} rows of groups, which {count} slabs do not divide"
        )
    words, scale, zero = parts = (f"{module}.W_q", f"{module}.scale", f"{module}.zero")
    stored.part(words, (dtype,), (height, width))
    scales = stored.part(scale, _SCALES, (groups, 1) if axis else (1, groups))
    stored.part(zero, (scales.dtype,), scales.shape)
    shifts = tuple(apart * place for place in reversed(range(count)))
    header = TensorHeader(f"{module}.weight", (rows, columns), stored.dtype)
    return Weight(header, parts, bits, width, height, shifts, across=not axis)


def _sizes(stored: Stored, module: str, leaf: str, count: int = 1) -> list[int]:
    name = f"{module}.{leaf}"
    stored.part(name, _SIZES, *(((), (1,)) if count == 1 else ((count,),)))
    return [int(value) for value in stored.checkpoint.read(name).reshape(-1)]


HQQ = Format(("hqq",), find, parts=(".W_q",))
