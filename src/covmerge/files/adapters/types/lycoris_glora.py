"""GLoRA of LyCORIS's files: an update of low rank, and one of the layer's inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, alpha_of


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank, window = layer.size("a2", 0), layer.shape[2:]
    ones = tuple(1 for _ in window)
    if "bm" in layer:
        layer.refuse("has a core (bm.weight), which LyCORIS writes for no layer that needs one")
    return {
        "a1": (layer.d_in, rank, *ones),
        "a2": (rank, layer.d_in, *ones),
        "b1": (layer.d_out, rank, *ones),
        "b2": (rank, layer.d_in, *window),
        **alpha_of(layer),
    }


def _weight(layer: Layer) -> Tensor:
    """W + s (W A₁ A₂ + B₁ B₂), the wanted rows."""
    weight, scale = layer.weight, layer.scaling(layer.size("a2", 0))
    inner, outer = layer["a1"].flatten(1), layer["a2"].flatten(1)
    channels = weight.view(len(weight), layer.d_in, -1)
    turned = torch.einsum("oik,ir,rj->ojk", channels, inner, outer).reshape(weight.shape)
    left = layer["b1"].flatten(1)[layer.rows]
    turned.addmm_(left, layer["b2"].flatten(1))
    return weight.add_(turned, alpha=scale)


LYCORIS_GLORA = AdapterType(
    name="GLoRA (`a1`, `a2`, `b1`, `b2`)",
    equation="W + s·(W·A₁·A₂ + B₁·B₂)",
    ends={f".{part}.weight": part for part in ("a1", "a2", "b1", "b2", "bm")},
    marks=frozenset({"a1", "b1"}),
    shapes=_shapes,
    weight=_weight,
)
