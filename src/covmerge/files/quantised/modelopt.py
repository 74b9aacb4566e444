"""Weights with scales, as NVIDIA's Model Optimizer stores them (`modelopt`).

`X.weight` is float8, and w = q · s with s in `X.weight_scale`, for the tensor, each row or each block.
Bytes as scales are exponents for 32 numbers of a row (MXFP8). NVFP4 has two E2M1 numbers per byte, with
w = q · (s · g) and g in `X.weight_scale_2`.
"""

from __future__ import annotations

import torch

from covmerge.files.quantised.fp8 import (
    EXPONENTS,
    FLOAT4,
    FLOAT8,
    MXFP4,
    MXFP8,
    NVFP4,
    ROW,
    TENSOR,
    GlobalScale,
    Numbers,
    Scaled,
    how_scaled,
    of_activations,
    scaled,
)
from covmerge.files.quantised.packed import Format, Found, Stored

_SCALE, _WHOLE = "_scale", "_scale_2"
_BLOCK = (128, 128)
# Tensors that a client applies to a layer's inputs or adds to its outputs, and that no weight can hold.
_BESIDE = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "weight_zero_point")


def find(stored: Stored) -> Found:
    """Return the layers with `weight_scale`; see `Found`."""
    headers = stored.checkpoint.headers
    beside = next((name for name in headers if name.rpartition(".")[2] in _BESIDE), None)
    if beside is not None:
        stored.refuse(f"'{beside}' is there, where layers that are their weights alone can be read")
    names = [name.removesuffix(_SCALE) for name in headers if name.endswith(f".weight{_SCALE}")]
    tensors = tuple(_weight(stored, name) for name in names)
    kinds = dict.fromkeys(_kind(tensor) for tensor in tensors)
    said = f"Model Optimizer, {' and '.join(kinds)}, {how_scaled(tensors)}"
    return Found(tensors, said, of_activations(stored))


def _weight(stored: Stored, name: str) -> Scaled:
    headers = stored.checkpoint.headers
    scale, whole = f"{name}{_SCALE}", f"{name}{_WHOLE}"
    exponents = headers[scale].dtype in EXPONENTS
    if name in headers and headers[name].dtype in FLOAT4:
        if exponents:
            return scaled(stored, name, scale, MXFP4)
        return scaled(stored, name, scale, NVFP4, whole=GlobalScale(whole, divides=False))
    if exponents:
        return scaled(stored, name, scale, MXFP8)
    numbers = Numbers((*FLOAT8, torch.int8), [TENSOR, ROW, _BLOCK])
    return scaled(stored, name, scale, numbers)


def _kind(tensor: Scaled) -> str:
    return "NVFP4" if tensor.whole else f"{tensor.bits} bit"


FORMAT = Format(
    ("modelopt",),
    find,
    parts=("weight_scale", "weight_scale_2"),
    plain_modules="ignore",
)
