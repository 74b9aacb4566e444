"""Packed weights in a checkpoint that does not say so: nothing may take their codes for weights.

A tensor is packed if its dtype holds no weights by itself and its scale is stored beside it. One
without the other is plain: a model that was cast to float8, a parameter that is called `scales`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from covmerge.base.types import TensorHeader

_WORDS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32)
# After the packed tensor's name, and in its module.
_OF_TENSOR = ("_scale", "_scale_inv", "_scales", "_scale_2", ".absmax", ".scale")
_OF_MODULE = (
    *("scales", "SCB", "weight_scale", "weight_scale_inv", "weight_scales", "scale_weight"),
    *("weight._scale", "_scale", "_weight_scale"),
)
_OF_WEIGHT = "scale"  # a name that others have too
_WEIGHTS = ("weight", "W_q")
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
# What packed numbers may be, and words that scales are called by.
_CODES = (*_WORDS, torch.uint16)
_SCALE = re.compile(
    r"scale|scb\b|absmax|amax|quant|step_size|codebook|lut\b|zero|range", re.IGNORECASE
)
_STATE = ".quant_state.bitsandbytes__"  # whose codes may be stored as any dtype


def packed_pair(headers: Mapping[str, TensorHeader]) -> tuple[str, str] | None:
    """Return the first tensor that is packed, and what lies beside it that says so.

    Example:
        >>> held = {"a.weight": torch.int8, "a.SCB": torch.float32, "b.scales": torch.float32}
        >>> packed_pair({name: TensorHeader(name, (2, 2), held[name]) for name in held})
        ('a.weight', 'a.SCB')
    """
    for name, header in headers.items():
        tensor, state, _ = name.partition(_STATE)
        if state and tensor in headers:
            return tensor, name
        if is_small(header) or header.dtype in _WORDS:
            scale = next((n for n in _scales_of(name) if n != name and n in headers), None)
            if scale is not None:
                return name, scale
    weights = [name for name, header in headers.items() if _is_small_weight(header)]
    return next(iter(_beside(headers, weights).items()), None)


def _is_small_weight(header: TensorHeader) -> bool:
    return is_small(header) and "weight" in header.name.rpartition(".")[2]


def is_small(header: TensorHeader) -> bool:
    """Whether it holds floating-point numbers of 8 bits or fewer."""
    return str(header.dtype).startswith(("torch.float8", "torch.float4"))


def scales_of_codes(headers: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Return the integer tensors that have a floating-point scale beside them, and that scale.

    A scale is known by a word of its name. It lies in the module of the codes, or in one whose name begins
    with theirs.

    Example:
        >>> held = {"a.fc.weight": torch.int8, "a.fc.weight_quantizer._scale": torch.float32}
        >>> scales_of_codes({name: TensorHeader(name, (2, 2), held[name]) for name in held})
        {'a.fc.weight': 'a.fc.weight_quantizer._scale'}
    """
    return _beside(headers, [name for name, header in headers.items() if header.dtype in _CODES])


def _beside(headers: Mapping[str, TensorHeader], codes: Sequence[str]) -> dict[str, str]:
    """Return those of some tensors that have a scale beside them, and that scale."""
    if not codes:
        return {}
    inside: dict[str, list[str]] = {}
    for name, header in headers.items():
        if _is_scale(header):
            module = name.rpartition(".")[0]
            for outer in {module, module.rpartition(".")[0]}:
                inside.setdefault(outer, []).append(name)
    found: dict[str, str] = {}
    for name in codes:
        module, dot, leaf = name.rpartition(".")
        rests = {other: other.removeprefix(module + dot) for other in inside.get(module, ())}
        scale = next((o for o, r in rests.items() if _belongs(r, leaf, module)), None)
        if scale is not None:
            found[name] = scale
    return found


def _is_scale(header: TensorHeader) -> bool:
    """Whether it is called a scale, and has the dtype of one; no scale is float8 but an exponent."""
    wide = header.dtype.itemsize > 1 or "e8m0" in str(header.dtype)
    return header.dtype.is_floating_point and wide and bool(_SCALE.search(header.name))


def _belongs(rest: str, leaf: str, module: str) -> bool:
    """Whether a scale, named from the module of the codes on, is theirs."""
    return rest.startswith(leaf) or bool(module and "." not in rest)


def _scales_of(name: str) -> list[str]:
    module, dot, leaf = name.rpartition(".")
    found = [f"{name}{end}" for end in _OF_TENSOR]
    found += [f"{module}{dot}{end}" for end in _OF_MODULE]
    if leaf in _WEIGHTS:
        found.append(f"{module}{dot}{_OF_WEIGHT}")
    if name.endswith(_BLOCKS):
        found.append(f"{name.removesuffix(_BLOCKS)}{_EXPONENTS}")
    return found
