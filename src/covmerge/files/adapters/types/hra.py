"""HRA (arXiv:2405.17484): the layer's inputs, reflected at r hyperplanes one after another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, lengths


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    return {"u": (layer.columns, layer.rank("u", 1))}


def _weight(layer: Layer) -> Tensor:
    """W Π (I − 2 u uᵀ), the wanted rows; with `apply_GS` the u are made orthogonal first."""
    normals = layer["u"].double()
    if layer.flag("apply_GS"):
        normals = _orthonormal(normals)
    normals = (normals / lengths(normals, 0)).to(layer["u"].dtype)
    weight = layer.weight.clone()
    for normal in normals.T:
        weight -= torch.outer(2 * (weight @ normal), normal)
    return weight


def _orthonormal(vectors: Tensor) -> Tensor:
    """Gram–Schmidt, in the order of the columns."""
    found: list[Tensor] = []
    for vector in vectors.T:
        rest = vector
        for earlier in found:
            rest = rest - (earlier @ rest) * earlier
        found.append(rest / lengths(rest, 0))
    return torch.stack(found, dim=1)


HRA = AdapterType(
    name="HRA",
    equation="W·Π(I − 2·u·uᵀ)",
    ends={".hra_u": "u"},
    shapes=_shapes,
    weight=_weight,
    fields=frozenset({"r", "apply_GS"}),
    unused=frozenset({"init_weights"}),
)
