"""BD-LoRA: LoRA of which one factor is a diagonal of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

_SIDES = {"down": "target_modules_bd_a", "up": "target_modules_bd_b"}


def _blocks(layer: Layer, side: str) -> int:
    """How many blocks a factor has: those of the configuration, if it names a part of the layer's name."""
    given: Any = layer.option("use_bdlora")
    fields = cast("dict[str, object]", given if isinstance(given, dict) else {})
    names: object = fields.get(_SIDES[side]) or []
    count = fields.get("nblocks", 1)
    if not isinstance(names, list) or type(count) is not int or count < 1:
        layer.refuse(f"has use_bdlora = {given}, whose lists of names or nblocks are damaged")
    return count if any(str(name) in layer.name for name in cast("list[object]", names)) else 1


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("down", 0)
    down, up = _blocks(layer, "down"), _blocks(layer, "up")
    if rank % down or layer.d_in % down or layer.d_out % up or rank % up:
        layer.refuse(
            f"is {list(layer.shape)} in the base, which {max(down, up)} blocks of rank {rank} do not divide"
        )
    return {"down": (rank, layer.d_in // down), "up": (layer.d_out, rank // up)}


def _factor(layer: Layer, side: str) -> Tensor:
    blocks = layer[side].chunk(_blocks(layer, side))
    return cast("Any", torch).block_diag(*blocks)


def _factors(layer: Layer) -> LowRank:
    scale = layer.scaling(layer.rank("down", 0))
    return LowRank(_factor(layer, "up") * scale, _factor(layer, "down"))


BDLORA = AdapterType(
    name="LORA (BD-LoRA)",
    equation="W + s·B·A, one of them a diagonal of blocks",
    ends={},  # those of LoRA
    shapes=_shapes,
    factors=_factors,
    rank=lambda layer: layer.rank("down", 0),
)
