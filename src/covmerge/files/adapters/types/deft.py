"""DEFT and PaRa: a subspace of the outputs, taken away and written anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

_linalg: Any = torch.linalg  # torch carries no types for it


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = min(layer.integer("r", 8, least=1), layer.d_out)
    if layer.option("decomposition_method", "relu") not in ("relu", "qr"):
        layer.refuse(
            f"has decomposition_method = {layer.option('decomposition_method')!r}, and relu and qr are read"
        )
    shapes: dict[str, Shape] = {"P": (layer.d_out, rank)}
    return shapes if layer.flag("para") else {**shapes, "R": (rank, layer.d_in)}


def _weight(layer: Layer) -> Tensor:
    """W + Q (s R − Nᵀ W), of "relu" Q = P and N = relu(P), of "qr" both are P's orthonormal columns."""
    stored, weight = layer["P"], layer.weight
    if layer.option("decomposition_method", "relu") == "qr":
        left = right = _linalg.qr(stored)[0]
    else:
        left, right = stored, stored.relu()
    inner = -(right.T @ weight)
    if not layer.flag("para"):
        inner += layer["R"] * _scale(layer, stored.shape[1])
    return weight.addmm_(left, inner)


def _scale(layer: Layer, rank: int) -> float:
    return layer.number("alpha", 0.0) / rank if layer.option("alpha") else 1.0


DEFT = AdapterType(
    name="DEFT",
    equation="W + Q·(s·R − Nᵀ·W), Q and N made of P",
    ends={".deft_P": "P", ".deft_R": "R"},
    shapes=_shapes,
    weight=_weight,
    by_rows=False,
    fields=frozenset({"r", "decomposition_method", "para", "alpha"}),
    unused=frozenset({"deft_dropout", "init_scale", "init_weights"}),
)
