"""SHiRA (arXiv:2406.13175): a sparse update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, check_places


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("weight", 0)
    return {"weight": (count,), "indices": (2, count)}


def _update(layer: Layer) -> Tensor:
    """The numbers at their places; whole."""
    places, values = layer["indices"].long(), layer["weight"]
    check_places(layer, places[0], layer.d_out)
    check_places(layer, places[1], layer.d_in)
    dense = torch.zeros(layer.d_out, layer.d_in, dtype=values.dtype)
    return dense.index_put_((places[0], places[1]), values, accumulate=True)


SHIRA = AdapterType(
    name="SHIRA",
    equation="W + a sparse matrix",
    ends={".shira_weight": "weight", ".shira_indices": "indices"},
    shapes=_shapes,
    update=_update,
    by_rows=False,
    integers=frozenset({"indices"}),
    fields=frozenset({"r"}),
    unused=frozenset({"mask_type", "random_seed", "init_weights"}),
)
