"""Differences of whole tensors, as LyCORIS ("full", "norm") and ComfyUI's files have them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

DIFFERENCE, OF_BIAS = "difference", "difference of bias"


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    return {DIFFERENCE: layer.shape}


def _update(layer: Layer) -> Tensor:
    """The wanted rows of the difference."""
    return layer[DIFFERENCE].reshape(layer.d_out, -1)[layer.rows]


def _matrix(parts: Mapping[str, Shape]) -> tuple[int, int]:
    shape = parts[DIFFERENCE]
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


DIFF = AdapterType(
    name="full, norm (`diff`, `diff_b`, `w_norm`, `b_norm`)",
    equation="W + D, of weights and of biases",
    ends={
        ".diff": DIFFERENCE,
        ".w_norm": DIFFERENCE,
        ".diff_b": OF_BIAS,
        ".b_norm": OF_BIAS,
    },
    marks=frozenset({DIFFERENCE}),
    shapes=_shapes,
    update=_update,
    matrix=_matrix,
    vectors=True,
)
