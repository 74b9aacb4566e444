"""Float8 and int8 with scales: FP8, and NVIDIA's Model Optimizer, optimum-quanto and torchao.

FP8, as DeepSeek and transformers store it: `X.weight` is float8, and w = q · s, with s in
`X.weight_scale_inv` (`X.scale` in DeepSeek-V4's files, `X.qscale_weight` in Mistral's). s is one number for
each block of `weight_block_size` weights (the last row and column of blocks are cut off if the sizes do not
divide), or one number for all. DeepSeek-V4 stores experts as two E2M1 numbers per byte, with a power of two
for every 32 numbers of a row.

`modelopt`: `X.weight` is float8, with s in `X.weight_scale`, for the tensor, each row or each block. Bytes
as scales are exponents for 32 numbers of a row (MXFP8). NVFP4 has two E2M1 numbers per byte, with
w = q · (s · g) and g in `X.weight_scale_2`.

`quanto`: `X.weight._data` is int8 or float8, and `X.weight._scale` the scale of the row, or of the tensor.
States of 2 and 4 bits cannot be read, because they do not hold the layers' shapes.

`torchao` (`Float8Tensor`, `Int8Tensor` …): `X._weight_qdata` are the numbers, `X._weight_scale` their
scales and `X._weight_zero_point` their zero points, for the tensor, each row, or each group of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from covmerge.files.quantised.packed import SMALLEST, Format, Found, Stored
from covmerge.files.quantised.scaled import (
    EXPONENTS,
    FLOAT4,
    FLOAT8,
    MXFP4,
    MXFP8,
    NVFP4,
    ROW,
    TENSOR,
    WIDE,
    Block,
    Numbers,
    Scaled,
    as_block,
    how_scaled,
    of_activations,
    scaled,
)

_CONVERTED = "modules_to_not_convert"

# FP8.

_LEAVES = ("weight_scale_inv", "qscale_weight")
_SHORT = "scale"  # this name belongs to other tensors too
_TWO_A_BYTE = (torch.int8, *FLOAT4[1:])  # DeepSeek-V4's dtypes of experts


def find_fp8(stored: Stored) -> Found:
    """Return the layers with `weight_scale_inv`; see `Found`."""
    stored.setting("fmt", "e4m3", "float8_e4m3fn", None)
    given = stored.settings.get("weight_block_size")
    blocks = [] if given is None else [as_block(stored, given)]
    tensors = tuple(_of_fp8(stored, *pair, blocks) for pair in _pairs(stored))
    return Found(tensors, f"FP8, {how_scaled(tensors)}", of_activations(stored))


def _pairs(stored: Stored) -> Iterator[tuple[str, str]]:
    """Yield names of weights, each with the name of its scales."""
    headers = stored.checkpoint.headers
    for name in headers:
        module, _, leaf = name.rpartition(".")
        weight = headers.get(f"{module}.weight")
        if leaf in _LEAVES or (
            leaf == _SHORT and weight is not None and weight.dtype in (*FLOAT8, *_TWO_A_BYTE)
        ):
            yield f"{module}.weight", name


def _of_fp8(stored: Stored, name: str, scale: str, blocks: Sequence[Block]) -> Scaled:
    header = stored.checkpoint.headers.get(name)
    if header is not None and header.dtype in _TWO_A_BYTE:
        return scaled(stored, name, scale, replace(MXFP4, dtypes=_TWO_A_BYTE))
    return scaled(stored, name, scale, Numbers(FLOAT8, [TENSOR, ROW, *blocks]))


FP8 = Format(
    ("fp8", "mxfp8"),
    find_fp8,
    parts=("weight_scale", "weight_scale_inv"),
    plain_modules=_CONVERTED,
    dequantise="from_pretrained(FOLDER, quantization_config=FineGrainedFP8Config(dequantize=True)), then "
    "save_pretrained(NEW, save_original_format=False)",
)

# Model Optimizer.

_OF_BLOCKS = Numbers((*FLOAT8, torch.int8), [TENSOR, ROW, (128, 128)])
# Tensors that a client applies to a layer's inputs or adds to its outputs, and that no weight can hold.
_BESIDE = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "weight_zero_point")


def find_modelopt(stored: Stored) -> Found:
    """Return the layers with `weight_scale`; see `Found`."""
    headers = stored.checkpoint.headers
    beside = next((name for name in headers if name.rpartition(".")[2] in _BESIDE), None)
    if beside is not None:
        stored.refuse(f"'{beside}' is there, where layers that are their weights alone can be read")
    modules = stored.modules(".weight_scale")
    tensors = tuple(_of_modelopt(stored, f"{module}.weight") for module in modules)
    kinds = dict.fromkeys("NVFP4" if one.whole else f"{one.bits} bit" for one in tensors)
    said = f"Model Optimizer, {' and '.join(kinds)}, {how_scaled(tensors)}"
    return Found(tensors, said, of_activations(stored))


def _of_modelopt(stored: Stored, name: str) -> Scaled:
    headers, scale = stored.checkpoint.headers, f"{name}_scale"
    exponents = headers[scale].dtype in EXPONENTS
    if name not in headers or headers[name].dtype not in FLOAT4:
        return scaled(stored, name, scale, MXFP8 if exponents else _OF_BLOCKS)
    if exponents:
        return scaled(stored, name, scale, MXFP4)
    return scaled(stored, name, scale, NVFP4, whole=f"{name}_scale_2")


MODELOPT = Format(
    ("modelopt",),
    find_modelopt,
    parts=("weight_scale", "weight_scale_2"),
    plain_modules="ignore",
)

# quanto.

_OF_QUANTO = Numbers((torch.int8, *FLOAT8), [TENSOR, ROW], scales=WIDE)


def find_quanto(stored: Stored) -> Found:
    """Return the weights with `_data`; see `Found`."""
    for name in stored.modules("._data._data"):
        stored.refuse(
            f"'{name}._data._data' is there: of 2 and 4 bits the shapes of layers are not stored"
        )
    tensors = tuple(
        scaled(stored, f"{name}._data", f"{name}._scale", _OF_QUANTO, plain=name)
        for name in stored.modules("._data")
    )
    leaves = ("input_scale", "output_scale")
    unused = (n for n in stored.checkpoint.headers if n.rpartition(".")[2] in leaves)
    return Found(tensors, f"quanto, 8 bit, {how_scaled(tensors)}", frozenset(unused))


QUANTO = Format(
    ("quanto",),
    find_quanto,
    parts=("._data", "._scale", "._shift"),
    plain_modules=_CONVERTED,
)

# torchao.

_START = "_weight_"
_DATA, _SCALE, _ZEROS = (f"{_START}{leaf}" for leaf in ("qdata", "scale", "zero_point"))


def find_torchao(stored: Stored) -> Found:
    """Return the layers with `_weight_qdata`; see `Found`."""
    leaves = {name: name.rpartition(".")[2] for name in stored.checkpoint.headers}
    for name, leaf in leaves.items():
        if leaf.startswith(_START) and leaf not in (_DATA, _SCALE, _ZEROS):
            stored.refuse(f"'{name}' is there, where numbers of 8 bits with scales can be read")
    modules = [name.rpartition(".")[0] for name, leaf in leaves.items() if leaf == _DATA]
    tensors = tuple(_of_torchao(stored, module) for module in modules)
    return Found(tensors, f"torchao, 8 bit, {how_scaled(tensors)}")


def _of_torchao(stored: Stored, module: str) -> Scaled:
    data, scale, zeros = (f"{module}.{leaf}" for leaf in (_DATA, _SCALE, _ZEROS))
    blocks = [TENSOR, ROW, *_groups(stored, data, scale)]
    numbers = Numbers((torch.int8, *FLOAT8), blocks, scales=WIDE)
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


TORCHAO = Format(
    ("torchao",),
    find_torchao,
    parts=("_weight_qdata",),
    plain_modules=_CONVERTED,
)
