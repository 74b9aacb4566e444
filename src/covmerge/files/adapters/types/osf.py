"""OSF (arXiv:2504.07097): the smaller singular components of the weight, trained."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape
from covmerge.files.adapters.types.spectral import without_components


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("S", 0)
    if count > min(layer.shape):
        layer.refuse(f"is {list(layer.shape)} in the base, and has {count} singular components")
    return {"U": (layer.d_out, count), "S": (count,), "V": (count, layer.d_in)}


def _weight(layer: Layer) -> Tensor:
    """W without its smallest singular components, + U diag(S) V."""
    values = layer["S"]
    weight = without_components(layer.weight, len(values), smallest=True)
    return weight.addmm_(layer["U"] * values, layer["V"])


OSF = AdapterType(
    name="OSF",
    equation="W without its smallest singular components, + U·diag(S)·V",
    ends={
        ".osf_svd_params.U_low": "U",
        ".osf_svd_params.S_low": "S",
        ".osf_svd_params.V_low": "V",
    },
    shapes=_shapes,
    weight=_weight,
    by_rows=False,
    fields=frozenset({"effective_rank", "rank_pattern"}),
    unused=frozenset({"init_weights", "target_svd_config"}),
)
