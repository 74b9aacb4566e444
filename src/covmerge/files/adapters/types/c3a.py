"""C3A (arXiv:2407.19342): an update of circulant blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    size = max(1, layer.size("kernel", 2))
    if layer.d_out % size or layer.d_in % size:
        layer.refuse(
            f"is {list(layer.shape)} in the base, which blocks of {size} do not divide: pass the base that "
            "the adapter was trained on, or fetch the adapter again"
        )
    return {"kernel": (layer.d_out // size, layer.d_in // size, size)}


def _update(layer: Layer) -> Tensor:
    """Blocks with w[(j − i) mod b] at (i, j), over d_in; the wanted rows."""
    kernel = layer["kernel"]
    size = kernel.shape[2]
    rows = torch.arange(layer.d_out)[layer.rows]
    turned = (torch.arange(size)[None] - (rows % size)[:, None]) % size
    blocks = kernel[rows // size]
    return blocks.gather(2, turned[:, None].expand(blocks.shape)).flatten(1) / layer.d_in


C3A = AdapterType(
    name="C3A",
    equation="W + circulant blocks / d_in",
    ends={".c3a_kernel": "kernel"},
    shapes=_shapes,
    update=_update,
    fields=frozenset({"block_size", "block_size_pattern"}),
    unused=frozenset({"init_weights"}),
)
