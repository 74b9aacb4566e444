"""BEFT (arXiv:2509.15974): the biases of some layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.checkpoints.adapter_types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    return {"bias": (1, layer.d_out)}


def _bias(layer: Layer) -> Tensor:
    return layer.base_bias() + layer["bias"].flatten()


BEFT = AdapterType(
    name="BEFT",
    equation="b + the adapter's bias",
    ends={".beft_bias": "bias"},
    shapes=_shapes,
    bias=_bias,
    unused=frozenset({"init_weights"}),
)
