"""SHiRA (arXiv:2406.13175): a sparse update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.checkpoints.adapter_types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("weight", 0)
    return {"weight": (count,), "indices": (2, count)}


def _update(layer: Layer) -> Tensor:
    """The numbers at their places; whole."""
    places, values = layer["indices"].long(), layer["weight"]
    rows, columns = places
    for axis, limit in ((rows, layer.d_out), (columns, layer.d_in)):
        if axis.numel() and not 0 <= int(axis.min()) <= int(axis.max()) < limit:
            layer.refuse(
                f"is {list(layer.shape)} in the base, and its indices go from {int(axis.min())} to "
                f"{int(axis.max())}: pass the base that the adapter was trained on"
            )
    dense = torch.zeros(layer.d_out, layer.d_in, dtype=values.dtype)
    return dense.index_put_((rows, columns), values, accumulate=True)


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
