"""Weights with scales, as compressed-tensors stores them (llm-compressor, vLLM).

`X.weight` is float8 or int8, and w = (q - z) · s. s is in `X.weight_scale`, for the tensor, each row or
each block; z is in `X.weight_zero_point` if the format is asymmetric. `X.weight_g_idx` is the group of each
input if activation ordering mixes them. `X.weight_packed` has 4- or 6-bit numbers in bytes: NVFP4,
w = q · (s / g), with g in `X.weight_global_scale`; MXFP4 and MXFP6, w = q · 2^(s − 127). MXFP8 is float8
with such exponents. Or it has integers of 1 to 8 bits in int32 words (`pack-quantized`: W4A16),
`(d_out, d_in · bits / 32)`: the inputs of a row one after another, the lowest bits first; each number is
stored plus 2^(bits − 1). Then `X.weight_shape` has the two sizes of the weight, and zero points are packed
in the same way along the outputs, `(d_out · bits / 32, groups)`.

Groups of layers may have their own settings, given by patterns of names of which the first match holds. A
stranger's pattern is never matched here: the settings follow from the sizes and dtypes of stored tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised.gptq import said_of_groups
from covmerge.files.quantised.integers import WORD, Mixed
from covmerge.files.quantised.packed import SMALLEST, Format, Found, Stored
from covmerge.files.quantised.scaled import (
    EXPONENTS,
    FLOAT8,
    MXFP4,
    MXFP6,
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

_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"),
)
_PACKED, _SCALE, _ZEROS = "_packed", "_scale", "_zero_point"
_KINDS = {"num_bits": int, "type": str, "symmetric": bool}
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head", None)
_GROUPED = ("group", "tensor_group")
_BITS = range(1, 9)
_INT32 = (torch.int32,)
_MIXED = "_g_idx"
_UNSET = -1  # in the groups of a layer that was not calibrated
_TYPES = ("float", "int")
# Floating-point formats by their bits and their group size.
_SMALL = {(4, 16): NVFP4, (4, 32): MXFP4, (6, 32): MXFP6, (8, 32): MXFP8}
Schemes = list[dict[str, Any]]


def find(stored: Stored) -> Found:
    """Return the layers with `weight_scale`; see `Found`."""
    stored.setting("format", *_FORMATS)
    schemes = _of_weights(stored)
    headers = stored.checkpoint.headers
    packed = [f"{module}.weight" for module in stored.modules(f".weight{_PACKED}")]
    in_words = [name for name in packed if headers[f"{name}{_PACKED}"].dtype in _INT32]
    integers = _integers(stored, schemes, in_words)
    small = [_small(stored, schemes, name) for name in packed if name not in in_words]
    names = [f"{module}.weight" for module in stored.modules(f".weight{_SCALE}")]
    plain = [_weight(stored, schemes, name) for name in names if name not in packed]
    said = [*_said_of_integers(integers), *_said(headers, [*small, *plain])]
    return Found(
        (*integers, *small, *plain),
        f"compressed-tensors, {' and '.join(said)}",
        of_activations(stored),
    )


def _said_of_integers(tensors: Sequence[Scaled]) -> Iterator[str]:
    groups = ((one, one.block[1]) for one in tensors)
    kinds = {(one.bits, -1 if size == one.header.shape[1] else size) for one, size in groups}
    for bits, group in sorted(kinds):
        yield f"INT{bits}, {said_of_groups(group)}"


def _said(headers: Mapping[str, TensorHeader], tensors: Sequence[Scaled]) -> Iterator[str]:
    """Yield descriptions of the kinds of tensors with scales."""
    kinds: dict[str, list[Scaled]] = {}
    for tensor in tensors:
        kinds.setdefault(_kind(headers, tensor), []).append(tensor)
    for kind, alike in kinds.items():
        yield f"{kind}, {how_scaled(alike)}"


def _kind(headers: Mapping[str, TensorHeader], tensor: Scaled) -> str:
    weight, scale = (headers[name] for name in tensor.stored[:2])
    if weight.dtype is torch.int8:
        return "INT8"
    if tensor.whole is not None:
        return "NVFP4"
    return f"{'MX' if scale.dtype in EXPONENTS else ''}FP{tensor.bits}"


def _small(stored: Stored, schemes: Schemes, name: str) -> Scaled:
    """Return a weight of 4- or 6-bit floating-point numbers."""
    headers, packed = stored.checkpoint.headers, f"{name}{_PACKED}"
    scale = stored.part(f"{name}{_SCALE}", (torch.float8_e4m3fn, *EXPONENTS))
    kinds = [_SMALL[key] for key in _small_of(stored, schemes) if key[0] < MXFP8.bits]
    if not kinds:
        stored.refuse(
            f"'{packed}' is {headers[packed].dtype}, and no group of layers has such weights"
        )
    width = headers[packed].shape[-1] if headers[packed].shape else 0
    fits = [
        kind
        for kind in kinds
        if scale.dtype in kind.scales
        and scale.shape[-1:] == (width * MXFP8.bits // kind.bits // kind.blocks[0][1],)
    ]
    numbers = (*fits, *kinds)[0]
    zeros = f"{name}{_ZEROS}"
    if zeros in headers:
        stored.refuse(
            f"'{zeros}' is there, where symmetric numbers of {numbers.bits} bits can be read"
        )
    whole = f"{name}_global_scale" if numbers is NVFP4 else None
    return scaled(stored, packed, scale.name, numbers, plain=name, whole=whole, divides=True)


def _small_of(stored: Stored, schemes: Schemes) -> list[tuple[int, int]]:
    """Return bits and group size of each scheme of floating-point weights in groups."""
    found: list[tuple[int, int]] = []
    for scheme in schemes:
        group = scheme.get("group_size")
        if scheme.get("type") == "float" and group not in (None, -1):
            key = (scheme.get("num_bits", 8), group)
            if key not in _SMALL:
                known = ", ".join(f"{bits} bits by {size}" for bits, size in _SMALL)
                stored.refuse(
                    f"its weights are float of {shorten(key[0])} bits in groups of {shorten(group)}, "
                    f"where {known} can be read"
                )
            found.append(key)
    return found


def _weight(stored: Stored, schemes: Schemes, name: str) -> Scaled:
    """Return a weight of 8 bits."""
    headers = stored.checkpoint.headers
    scale, zeros = f"{name}{_SCALE}", f"{name}{_ZEROS}"
    small = _small_of(stored, schemes)
    if (8, 32) in small and scale in headers and headers[scale].dtype in EXPONENTS:
        return scaled(stored, name, scale, MXFP8)
    large = [s for s in schemes if s.get("type") != "float" or s.get("group_size") in (None, -1)]
    blocks = [block for scheme in large for block in _blocks(stored, scheme)] or [TENSOR, ROW]
    kinds = dict.fromkeys(scheme.get("type") for scheme in large)
    floats = FLOAT8 if not kinds or kinds.keys() & {"float", None} else ()
    integers = (torch.int8,) if not kinds or kinds.keys() & {"int", None} else ()
    if zeros not in headers:
        _check_zeros(stored, schemes, zeros)
    found = scaled(
        stored,
        name,
        scale,
        Numbers((*floats, *integers), list(dict.fromkeys(blocks))),
        zeros=zeros if zeros in headers else None,
        symmetric=bool(schemes) and all(scheme.get("symmetric", True) for scheme in schemes),
    )
    high, _ = found.block
    mixed = _mixed_of(stored, name, found.header.shape[1]) if high == 1 else None
    if mixed is None:
        return found
    return replace(found, mixed=mixed, stored=(*found.stored, mixed.name))


def _of_weights(stored: Stored) -> Schemes:
    """Return the config's settings for the weights of each group of layers."""
    groups: object = stored.settings.get("config_groups") or {}
    schemes = cast("dict[str, Any]", groups).values() if isinstance(groups, dict) else [groups]
    found: Schemes = []
    for scheme in schemes:
        group = cast("dict[str, Any]", scheme) if isinstance(scheme, dict) else {"weights": scheme}
        weights: object = group.get("weights")
        if weights is None:  # a group for activations only
            continue
        if not isinstance(weights, dict):
            stored.refuse(f"the weights of its config_groups are {shorten(weights)}, not settings")
        targets: object = group.get("targets", [])
        names = cast("list[object]", targets) if isinstance(targets, list) else [None]
        if not all(isinstance(name, str) for name in names):
            stored.refuse(
                f"the targets of its config_groups are {shorten(group['targets'])}, not names"
            )
        settings = cast("dict[str, Any]", weights)
        _check(stored, settings)
        found.append(settings)
    return found


def _check(stored: Stored, scheme: dict[str, Any]) -> None:
    """Check that the settings of weights are such that compressed-tensors itself accepts them."""
    for key, kind in _KINDS.items():
        if key in scheme and type(scheme[key]) is not kind:
            stored.refuse(f"{key} of its weights is {shorten(scheme[key])}")
    if scheme.get("type", "int") not in _TYPES:
        stored.refuse(f"type of its weights is {shorten(scheme['type'])}")
    strategy, group, block = (scheme.get(k) for k in ("strategy", "group_size", "block_structure"))
    if strategy not in _STRATEGIES:
        stored.refuse(f"strategy of its weights is {shorten(strategy)}")
    if strategy is not None and (strategy in _GROUPED) != (group not in (None, -1)):
        stored.refuse(
            f"strategy of its weights is {shorten(strategy)}, and their group_size {shorten(group)}"
        )
    if strategy is not None and (strategy == "block") != (block is not None):
        stored.refuse(
            f"strategy of its weights is {shorten(strategy)}, and their block_structure {shorten(block)}"
        )


def _group_of(stored: Stored, scheme: Mapping[str, Any]) -> int | None:
    """Return the number of inputs with one scale; None: there are no groups."""
    group = scheme.get("group_size")
    if group in (None, -1):
        return None
    if not (type(group) is int and SMALLEST <= group < 2**31):
        stored.refuse(f"its group_size is {shorten(group)}, where {SMALLEST} or more can be read")
    return group


def _blocks(stored: Stored, scheme: dict[str, Any]) -> list[Block]:
    """Return the sizes of blocks with one scale that the settings of a group of layers allow."""
    strategy, block = scheme.get("strategy"), scheme.get("block_structure")
    group = _group_of(stored, scheme)
    if group is not None:
        return [(1, group)]
    whole = {"tensor": [TENSOR], "channel": [ROW], "block": [], None: [TENSOR, ROW]}.get(strategy)
    if whole is None:
        stored.refuse(
            f"strategy of its weights is {shorten(strategy)}, where tensor, channel, group or block "
            "can be read"
        )
    blocks = strategy == "block" or (strategy is None and block is not None)
    return [*whole, *([as_block(stored, block)] if blocks else [])]


# Integers in words.


def _integers(stored: Stored, schemes: Schemes, names: Sequence[str]) -> list[Scaled]:
    """Return the weights that are integers in words."""
    if not names:
        return []
    sizes = list(dict.fromkeys(_size(stored, s) for s in schemes if s.get("type") != "float"))
    if not sizes:
        stored.refuse(f"'{names[0]}{_PACKED}' is torch.int32, and no group of layers has integers")
    tensors = [_in_words(stored, name, sizes) for name in names]
    symmetric = all(scheme.get("symmetric", True) for scheme in schemes)
    for tensor in tensors:
        if tensor.zeros is None:
            _check_zeros(stored, schemes, f"{tensor.header.name}{_ZEROS}")
        elif symmetric:
            stored.refuse(
                f"'{tensor.zeros}' is there, where its config says that weights are symmetric"
            )
    return tensors


def _size(stored: Stored, scheme: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return bits, and the number of inputs with one scale; None: all inputs."""
    bits = scheme.get("num_bits", 8)
    if bits not in _BITS:
        stored.refuse(f"its weights are int of {shorten(bits)} bits, not 1 to 8")
    if scheme.get("strategy") == "block":
        stored.refuse(
            "strategy of its weights is 'block', where tensor, channel or group can be read"
        )
    return bits, _group_of(stored, scheme)


def _check_zeros(stored: Stored, schemes: Schemes, name: str) -> None:
    """Check that a weight without zero points belongs to a symmetric scheme."""
    if schemes and all(scheme.get("symmetric") is False for scheme in schemes):
        stored.refuse(f"its weights are asymmetric, and '{name}' is missing")


def _in_words(stored: Stored, name: str, sizes: Sequence[tuple[int, int | None]]) -> Scaled:
    words, scale, shape, zeros = (
        f"{name}_{leaf}" for leaf in ("packed", "scale", "shape", "zero_point")
    )
    packed = stored.matrix(words, _INT32)
    grid = stored.part(scale, WIDE).shape
    stored.part(shape, (torch.int64, torch.int32), (2,))
    # For a model that is not local, they are the largest that words and scales allow.
    local = stored.checkpoint.folder is not None
    stated = [int(size) for size in stored.checkpoint.read(shape)] if local else None
    fits: set[tuple[int, int, int]] = set()
    for bits, group in sizes:
        most = packed[1] * WORD // bits
        if group is not None and len(grid) == 2:
            most = min(most, grid[1] * group)
        columns = most if stated is None else stated[1]
        groups = 1 if group is None else -(-columns // group)
        whole = -(-columns * bits // WORD) == packed[1] and grid == (packed[0], groups)
        if whole and stated in (None, [packed[0], columns]):
            fits.add((bits, min(group or columns, columns), columns))
    if len(fits) != 1:
        kinds = " or ".join(f"{bits} bits, {said_of_groups(group or -1)}" for bits, group in sizes)
        beside = "" if stated is None else f", and '{shape}' says {stated}"
        stored.refuse(
            f"'{words}' is {list(packed)} beside scales of {list(grid)}{beside}: "
            f"{'no layer' if not fits else 'more than one layer'} of {kinds} is stored so"
        )
    ((bits, group, columns),) = fits
    parts = (words, scale, shape)
    known = zeros if zeros in stored.checkpoint.headers else None
    if known is not None:
        stored.part(known, _INT32, (-(-packed[0] * bits // WORD), grid[1]))
        parts = (*parts, known)
    mixed = _mixed_of(stored, name, columns)
    parts = (*parts, mixed.name) if mixed is not None else parts
    header = TensorHeader(name, (packed[0], columns), stored.dtype)
    return Scaled(header, parts, (1, group), known, bits=bits, words=True, mixed=mixed)


def _mixed_of(stored: Stored, name: str, columns: int) -> Mixed | None:
    """Return the stored groups of a weight's inputs, or None if they are in order."""
    if f"{name}{_MIXED}" not in stored.checkpoint.headers:
        return None
    part = stored.part(f"{name}{_MIXED}", (*_INT32, torch.int64), (columns,))
    return Mixed(part.name, stored.checkpoint.source, _UNSET)


COMPRESSED = Format(
    ("compressed-tensors",),
    find,
    parts=(
        *("weight_scale", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx"),
        "weight_global_scale",
    ),
    plain_modules="ignore",
)
