"""torchao's state in safetensors: float8 and int8 numbers with scales (`Float8Tensor`, `Int8Tensor` …).

`X._weight_qdata` are the numbers, `X._weight_scale` their scales and `X._weight_zero_point` their zero
points, for the tensor, each row, or each group of a row: w = (q − z) · s.
"""

from __future__ import annotations

import torch

from covmerge.files.quantised.fp8 import (
    FLOAT8,
    ROW,
    TENSOR,
    Block,
    Numbers,
    Scaled,
    how_scaled,
    scaled,
)
from covmerge.files.quantised.packed import SMALLEST, Format, Found, Stored

_START = "_weight_"
_DATA, _SCALE, _ZEROS = (f"{_START}{leaf}" for leaf in ("qdata", "scale", "zero_point"))
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def find(stored: Stored) -> Found:
    """Return the layers with `_weight_qdata`; see `Found`."""
    headers = stored.checkpoint.headers
    modules = [name.rpartition(".")[0] for name in headers if name.rpartition(".")[2] == _DATA]
    for name in headers:
        leaf = name.rpartition(".")[2]
        if leaf.startswith(_START) and leaf not in (_DATA, _SCALE, _ZEROS):
            stored.refuse(f"'{name}' is there, where numbers of 8 bits with scales can be read")
    tensors = tuple(_weight(stored, module) for module in modules)
    return Found(tensors, f"torchao, 8 bit, {how_scaled(tensors)}")


def _weight(stored: Stored, module: str) -> Scaled:
    data, scale, zeros = (f"{module}.{leaf}" for leaf in (_DATA, _SCALE, _ZEROS))
    numbers = Numbers(
        (torch.int8, *FLOAT8), [TENSOR, ROW, *_groups(stored, data, scale)], scales=_SCALES
    )
    zeros = zeros if zeros in stored.checkpoint.headers else None
    return scaled(stored, data, scale, numbers, plain=f"{module}.weight", zeros=zeros)


def _groups(stored: Stored, data: str, scale: str) -> list[Block]:
    """Return the groups of a row with one scale, as far as the sizes give any."""
    known = [stored.checkpoint.headers.get(name) for name in (data, scale)]
    shape, grid = ((() if header is None else header.shape) for header in known)
    if len(shape) != 2 or len(grid) != 2 or not grid[1] or shape[1] % grid[1]:
        return []
    group = shape[1] // grid[1]
    return [(1, group)] if group >= SMALLEST else []


FORMAT = Format(
    ("torchao",),
    find,
    parts=("_weight_qdata",),
    plain_modules="modules_to_not_convert",
)
