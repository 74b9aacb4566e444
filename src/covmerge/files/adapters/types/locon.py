"""LoRA where its product is not all: with a Tucker core (LoCon), or as the direction of DoRA."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, alpha_of
from covmerge.files.adapters.types.loha import tucker

MIDDLE = "mid"
OF_GROUPS = (
    "is a convolution with groups, whose update is no kernel of such a convolution (PEFT does not merge it "
    "either): train without that layer, or remove its tensors from a copy of the adapter, and it from "
    "target_modules"
)


def is_grouped(rank: int, up: Shape) -> bool:
    """Whether B is that of a convolution with groups, each of which sees a part of the terms."""
    return len(up) > 2 and 0 < up[1] < rank and rank % up[1] == 0


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank, window = layer.size("down", 0), layer.shape[2:]
    ones = tuple(1 for _ in window)
    if is_grouped(rank, layer.parts["up"].shape):
        layer.refuse(OF_GROUPS)
    found = {"up": (layer.d_out, rank, *ones), **alpha_of(layer)}
    if MIDDLE in layer:
        return {**found, "down": (rank, layer.d_in, *ones), MIDDLE: (rank, rank, *window)}
    return {**found, "down": (rank, layer.d_in, *window)}


def _update(layer: Layer) -> Tensor:
    """The wanted rows of s B A, or of the same with a core between them."""
    rank = layer.size("down", 0)
    up = layer["up"].reshape(layer.d_out, rank)[layer.rows] * layer.scaling(rank)
    down = layer["down"].reshape(rank, -1)
    if MIDDLE in layer:
        return tucker(layer[MIDDLE], up.T, down).flatten(1)
    return up @ down


def _matrix(parts: Mapping[str, Shape]) -> tuple[int, int] | None:
    up, down = parts.get("up", ()), parts.get("down", ())
    if len(up) < 2 or len(down) < 2:
        return None
    return up[0], prod(down[1:]) * prod(parts.get(MIDDLE, ())[2:])


LOCON = AdapterType(
    name="LoCon",
    equation="W + s·B·(core)·A",
    ends={".lora_mid.weight": MIDDLE},  # and those of LoRA
    marks=frozenset({MIDDLE}),
    shapes=_shapes,
    update=_update,
    matrix=_matrix,
)
