"""BEFT (arXiv:2509.15974): the biases of some layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    return {"bias": (1, layer.d_out)}


def _update(layer: Layer) -> Tensor:
    return layer["bias"].view(-1, 1)[layer.rows]


BEFT = AdapterType(
    name="BEFT",
    equation="W, and its bias b + the adapter's",
    ends={".beft_bias": "bias"},
    shapes=_shapes,
    update=_update,
    vectors=True,
    leaf="bias",
    unused=frozenset({"init_weights"}),
)
