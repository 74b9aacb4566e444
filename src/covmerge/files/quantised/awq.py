"""AWQ (arXiv:2306.00978), version "gemm" as AutoAWQ stores it.

`X.qweight` `(d_in, d_out / 8)` and `X.qzeros` `(groups, d_out / 8)` hold eight outputs per word;
the 4-bit places of a word, from the lowest on, hold outputs 0, 2, 4, 6, 1, 3, 5, 7. `X.scales` is
`(groups, d_out)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.gptq import said_of_groups
from covmerge.files.quantised.integers import WORD, Grouped, unpacked
from covmerge.files.quantised.packed import Format, Found, Read, Stored

_BITS = 4
_OF_A_WORD = WORD // _BITS
SHIFTS = tuple(_BITS * place for place in (0, 4, 1, 5, 2, 6, 3, 7))
_INT32 = (torch.int32,)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Weight(Grouped):
    """The packed weight of a layer."""

    @property
    def run(self) -> tuple[int, int]:
        return 1, 1

    def values(self, words: Tensor, rows: range) -> Tensor:
        first = rows.start // _OF_A_WORD
        part = words[:, first : -(-rows.stop // _OF_A_WORD)]
        start = rows.start - first * _OF_A_WORD
        shifts = torch.tensor(SHIFTS, dtype=torch.int32)
        return unpacked(part, shifts, self.bits).flatten(1)[:, start : start + len(rows)]

    def zeros(self, read: Read, rows: range) -> Tensor:
        return self.values(read(self.stored[1], None), rows)


def find(stored: Stored) -> Found:
    """Return the layers with `qweight`; see `Found`."""
    stored.setting("bits", _BITS)
    stored.setting("version", "gemm", "GEMM", None)
    stored.version("gemm", "GEMM")
    group = stored.group(128)
    names = [name for name in stored.checkpoint.headers if name.endswith(".qweight")]
    tensors = tuple(_weight(stored, name.removesuffix(".qweight"), group) for name in names)
    return Found(tensors, f"AWQ, {_BITS} bit, {said_of_groups(group)}")


def _weight(stored: Stored, module: str, group: int) -> Weight:
    parts = tuple(f"{module}.{leaf}" for leaf in ("qweight", "qzeros", "scales"))
    shape = stored.part(parts[0], _INT32).shape
    if len(shape) != 2 or 0 in shape:
        stored.refuse(f"'{parts[0]}' is {list(shape)}, where a matrix can be read")
    d_in, d_out = shape[0], shape[1] * _OF_A_WORD
    group = d_in if group == -1 else group
    count = -(-d_in // group)
    stored.part(parts[1], _INT32, (count, shape[1]))
    stored.part(parts[2], _SCALES, (count, d_out))
    header = TensorHeader(f"{module}.weight", (d_out, d_in), stored.dtype)
    return Weight(header, parts, _BITS, group)


FORMAT = Format(
    ("awq",),
    find,
    parts=(".qweight", ".qzeros", ".scales"),
    plain_modules="modules_to_not_convert",
)
