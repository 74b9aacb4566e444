"""Weights with scales, as compressed-tensors stores them (llm-compressor, vLLM).

`X.weight` is float8 or int8, and w = (q - z) · s, with s in `X.weight_scale` for the tensor, each
row or each block, and z in `X.weight_zero_point` where the format is asymmetric.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from covmerge.quantised import packed_integers
from covmerge.quantised.fp8 import FLOAT8, Scaled, as_block, how_scaled, of_activations, scaled
from covmerge.quantised.packed import Found, Stored

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_WORDS = "pack-quantized"


def find(stored: Stored) -> Found:
    """Find layers with `weight_scale`; see `Found`.

    Raises:
        CheckpointError: another format of compressed-tensors, or sizes that contradict each other.
    """
    schemes = _of_weights(stored)
    if stored.setting("format", *_FORMATS, _WORDS) == _WORDS:
        return packed_integers.find(stored, schemes)
    given = (own.get("block_structure") for own in schemes)
    blocks = [as_block(stored, block) for block in given if block is not None]
    headers = stored.checkpoint.headers
    tensors: list[Scaled] = []
    for scale in [name for name in headers if name.endswith(".weight_scale")]:
        name = scale.removesuffix("_scale")
        zeros = f"{name}_zero_point"
        tensors.append(
            scaled(
                stored,
                name,
                scale,
                (*FLOAT8, torch.int8),
                blocks,
                zeros if zeros in headers else None,
            )
        )
    kinds = dict.fromkeys(
        "INT8" if headers[tensor.header.name].dtype is torch.int8 else "FP8" for tensor in tensors
    )
    said = f"compressed-tensors, {' and '.join(kinds)}, {how_scaled(tensors)}"
    return Found(tuple(tensors), said, of_activations(stored))


def _of_weights(stored: Stored) -> list[dict[str, Any]]:
    """What a config says of the weights of each group of layers."""
    groups: object = stored.settings.get("config_groups")
    schemes = cast("dict[str, Any]", groups).values() if isinstance(groups, dict) else ()
    found: list[dict[str, Any]] = []
    for scheme in schemes:
        weights: object = (
            cast("dict[str, Any]", scheme).get("weights") if isinstance(scheme, dict) else None
        )
        if isinstance(weights, dict):
            found.append(cast("dict[str, Any]", weights))
    return found
