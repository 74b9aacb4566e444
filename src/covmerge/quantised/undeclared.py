"""Packed weights in a checkpoint that does not say so: nothing may take their codes for weights.

A tensor is packed if its dtype holds no weights by itself and its scale is stored beside it. One
without the other is plain: a model that was cast to float8, a parameter that is called `scales`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from covmerge.types import TensorHeader

_WORDS = (torch.int8, torch.uint8, torch.int16, torch.int32)
# After the packed tensor's name, and in its module.
_OF_TENSOR = ("_scale", "_scale_inv", "_scales", "_scale_2", ".absmax", ".scale")
_OF_MODULE = (
    *("scales", "SCB", "weight_scale", "weight_scale_inv", "weight_scales", "scale_weight"),
    *("weight._scale", "_scale"),
)
_OF_WEIGHT = "scale"  # a name that others have too
_WEIGHTS = ("weight", "W_q")
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
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
        if "float8" in str(header.dtype) or header.dtype in _WORDS:
            scale = next((n for n in _scales_of(name) if n != name and n in headers), None)
            if scale is not None:
                return name, scale
    return None


def _scales_of(name: str) -> list[str]:
    module, dot, leaf = name.rpartition(".")
    found = [f"{name}{end}" for end in _OF_TENSOR]
    found += [f"{module}{dot}{end}" for end in _OF_MODULE]
    if leaf in _WEIGHTS:
        found.append(f"{module}{dot}{_OF_WEIGHT}")
    if name.endswith(_BLOCKS):
        found.append(f"{name.removesuffix(_BLOCKS)}{_EXPONENTS}")
    return found
