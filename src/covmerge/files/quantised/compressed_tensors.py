"""Weights with scales, as compressed-tensors stores them (llm-compressor, vLLM).

`X.weight` is float8 or int8, and w = (q - z) · s. s is in `X.weight_scale`, for the tensor, each row or
each block; z is in `X.weight_zero_point` if the format is asymmetric. `X.weight_g_idx` is the group of each
input if activation ordering mixes them. `X.weight_packed` has integers in words (`packed_integers`), or 4-
or 6-bit numbers in bytes: NVFP4, w = q · (s / g), with g in `X.weight_global_scale`; MXFP4 and MXFP6,
w = q · 2^(s − 127). MXFP8 is float8 with such exponents.

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
from covmerge.files.quantised import packed_integers
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
_TYPES = ("float", "int")
# Floating-point formats by their bits and their group size.
_SMALL = {(4, 16): NVFP4, (4, 32): MXFP4, (6, 32): MXFP6, (8, 32): MXFP8}
Schemes = list[dict[str, Any]]


def find(stored: Stored) -> Found:
    """Return the layers with `weight_scale`; see `Found`."""
    stored.setting("format", *_FORMATS)
    schemes = _of_weights(stored)
    headers = stored.checkpoint.headers
    integers = packed_integers.find(stored, schemes)
    bytes_of = {
        name.removesuffix(_PACKED): name
        for name, header in headers.items()
        if name.endswith(f".weight{_PACKED}") and header.dtype is not torch.int32
    }
    small = [_small(stored, schemes, name, packed) for name, packed in bytes_of.items()]
    known = {tensor.header.name for tensor in (*integers, *small)}
    names = [f"{module}.weight" for module in stored.modules(f".weight{_SCALE}")]
    plain = [_weight(stored, schemes, name) for name in names if name not in known]
    tensors = (*integers, *small, *plain)
    said = [*packed_integers.said(integers), *_said(headers, [*small, *plain])]
    return Found(tensors, f"compressed-tensors, {' and '.join(said)}", of_activations(stored))


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


def _small(stored: Stored, schemes: Schemes, name: str, packed: str) -> Scaled:
    """Return a weight of 4- or 6-bit floating-point numbers."""
    headers = stored.checkpoint.headers
    scale = stored.part(f"{name}{_SCALE}", (torch.float8_e4m3fn, *EXPONENTS))
    kinds = [_SMALL[key] for key in _small_of(stored, schemes) if key[0] < MXFP8.bits]
    fits = [
        kind
        for kind in kinds
        if scale.dtype in kind.scales
        and scale.shape[-1:] == (_columns(headers[packed], kind.bits) // kind.blocks[0][1],)
    ]
    if not kinds:
        stored.refuse(
            f"'{packed}' is {headers[packed].dtype}, and no group of layers has such weights"
        )
    numbers = (*fits, *kinds)[0]
    zeros = f"{name}{_ZEROS}"
    if zeros in headers:
        stored.refuse(
            f"'{zeros}' is there, where symmetric numbers of {numbers.bits} bits can be read"
        )
    whole = f"{name}_global_scale" if numbers is NVFP4 else None
    return scaled(stored, packed, scale.name, numbers, plain=name, whole=whole, divides=True)


def _columns(packed: TensorHeader, bits: int) -> int:
    return packed.shape[-1] * MXFP8.bits // bits if packed.shape else 0


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
        packed_integers.check_zeros(stored, schemes, zeros)
    found = scaled(
        stored,
        name,
        scale,
        Numbers((*floats, *integers), list(dict.fromkeys(blocks))),
        zeros=zeros if zeros in headers else None,
        symmetric=bool(schemes) and all(scheme.get("symmetric", True) for scheme in schemes),
    )
    high, _ = found.block
    mixed = packed_integers.mixed_of(stored, name, found.header.shape[1]) if high == 1 else None
    return (
        found if mixed is None else replace(found, mixed=mixed, stored=(*found.stored, mixed.name))
    )


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


def _blocks(stored: Stored, scheme: dict[str, Any]) -> list[Block]:
    """Return the sizes of blocks with one scale that the settings of a group of layers allow."""
    strategy, block = scheme.get("strategy"), scheme.get("block_structure")
    group = scheme.get("group_size")
    if strategy in _GROUPED or (strategy is None and group not in (None, -1)):
        if not (type(group) is int and SMALLEST <= group < 2**31):
            stored.refuse(
                f"its group_size is {shorten(group)}, where {SMALLEST} or more can be read"
            )
        return [(1, group)]
    whole = {"tensor": [TENSOR], "channel": [ROW], "block": [], None: [TENSOR, ROW]}.get(strategy)
    if whole is None:
        stored.refuse(
            f"strategy of its weights is {shorten(strategy)}, where tensor, channel, group or block "
            "can be read"
        )
    blocks = strategy == "block" or (strategy is None and block is not None)
    return [*whole, *([as_block(stored, block)] if blocks else [])]


COMPRESSED = Format(
    ("compressed-tensors",),
    find,
    parts=(
        *("weight_scale", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx"),
        "weight_global_scale",
    ),
    plain_modules="ignore",
)
