"""Weights with scales, as compressed-tensors stores them (llm-compressor, vLLM).

`X.weight` is float8 or int8, and w = (q - z) · s, with s in `X.weight_scale` for the tensor, each
row or each block, and z in `X.weight_zero_point` where the format is asymmetric.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised import packed_integers
from covmerge.files.quantised.fp8 import (
    FLOAT8,
    ROW,
    TENSOR,
    Block,
    Scaled,
    as_block,
    how_scaled,
    of_activations,
    scaled,
)
from covmerge.files.quantised.packed import Found, Stored

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_WORDS = "pack-quantized"
_KINDS = {"num_bits": int, "type": str, "symmetric": bool}
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head", None)
_GROUPED = ("group", "tensor_group")
_DTYPES = {"float": FLOAT8, "int": (torch.int8,)}


def find(stored: Stored) -> Found:
    """Find layers with `weight_scale`; see `Found`.

    Raises:
        CheckpointError: another format of compressed-tensors, or sizes that contradict each other.
    """
    schemes = _of_weights(stored)
    if stored.setting("format", *_FORMATS, _WORDS) == _WORDS:
        return packed_integers.find(stored, schemes)
    blocks = [block for own in schemes for block in _blocks(stored, own)] or [TENSOR, ROW]
    kinds = dict.fromkeys(own.get("type") for own in schemes) or _DTYPES
    dtypes = tuple(d for kind in (_DTYPES if None in kinds else kinds) for d in _DTYPES[str(kind)])
    symmetric = bool(schemes) and all(own.get("symmetric", True) for own in schemes)
    headers = stored.checkpoint.headers
    tensors: list[Scaled] = []
    for scale in [name for name in headers if name.endswith(".weight_scale")]:
        name = scale.removesuffix("_scale")
        zeros = f"{name}_zero_point"
        if zeros not in headers:
            packed_integers.check_zeros(stored, schemes, zeros)
        tensors.append(
            scaled(
                stored,
                name,
                scale,
                dtypes,
                blocks,
                zeros if zeros in headers else None,
                symmetric=symmetric,
            )
        )
    stored_as = dict.fromkeys(
        "INT8" if headers[tensor.header.name].dtype is torch.int8 else "FP8" for tensor in tensors
    )
    said = f"compressed-tensors, {' and '.join(stored_as)}, {how_scaled(tensors)}"
    return Found(tuple(tensors), said, of_activations(stored))


def _of_weights(stored: Stored) -> list[dict[str, Any]]:
    """What a config says of the weights of each group of layers.

    Raises:
        CheckpointError: it says what no such weights have.
    """
    groups: object = stored.settings.get("config_groups") or {}
    schemes = cast("dict[str, Any]", groups).values() if isinstance(groups, dict) else [groups]
    found: list[dict[str, Any]] = []
    for scheme in schemes:
        group = cast("dict[str, Any]", scheme) if isinstance(scheme, dict) else {"weights": scheme}
        weights: object = group.get("weights")
        if weights is None:  # a group of activations alone
            continue
        if not isinstance(weights, dict):
            stored.refuse(f"the weights of its config_groups are {shorten(weights)}, not settings")
        targets: object = group.get("targets", [])
        names = cast("list[object]", targets) if isinstance(targets, list) else [None]
        if not all(isinstance(name, str) for name in names):
            stored.refuse(
                f"the targets of its config_groups are {shorten(group['targets'])}, not names"
            )
        own = cast("dict[str, Any]", weights)
        _check(stored, own)
        found.append(own)
    return found


def _check(stored: Stored, own: dict[str, Any]) -> None:
    """See that what a config says of weights is what compressed-tensors itself takes."""
    for key, kind in _KINDS.items():
        if key in own and type(own[key]) is not kind:
            stored.refuse(f"{key} of its weights is {shorten(own[key])}")
    if own.get("type", "int") not in _DTYPES:
        stored.refuse(f"type of its weights is {shorten(own['type'])}")
    strategy, group, block = (own.get(k) for k in ("strategy", "group_size", "block_structure"))
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


def _blocks(stored: Stored, own: dict[str, Any]) -> list[Block]:
    """What has one scale, by what a config says of the weights of a group of layers."""
    strategy, block = own.get("strategy"), own.get("block_structure")
    whole = {"tensor": [TENSOR], "channel": [ROW], "block": [], None: [TENSOR, ROW]}.get(strategy)
    if whole is None:
        stored.refuse(
            f"strategy of its weights is {shorten(strategy)}, where tensor, channel or block can be read"
        )
    blocks = strategy == "block" or (strategy is None and block is not None)
    return [*whole, *([as_block(stored, block)] if blocks else [])]
