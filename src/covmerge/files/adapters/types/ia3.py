"""(IA)³ (arXiv:2205.05638): outputs, or inputs of feed-forward layers, times one number each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    window = tuple(1 for _ in layer.shape[2:])
    inputs = _of_inputs(layer)
    if window:
        return {"l": (1, layer.d_in * _groups(layer) if inputs else layer.d_out, *window)}
    return {"l": (1, layer.d_in) if inputs else (layer.d_out, 1)}


def _of_inputs(layer: Layer) -> bool:
    """Whether its inputs are scaled: linear layers tell by the shape, convolutions by the configuration."""
    shape = layer.parts["l"].shape
    if len(layer.shape) == 2:
        return shape[0] == 1
    assert layer.config is not None
    return layer.config.ends_in("feedforward_modules", layer.name)


def _groups(layer: Layer) -> int:
    """Of a convolution whose inputs are scaled: each group of outputs sees inputs of its own."""
    groups = layer.size("l", 1) // layer.d_in
    return groups if groups and layer.d_out % groups == 0 else 1


def _weight(layer: Layer) -> Tensor:
    scale = layer["l"].flatten()
    if not _of_inputs(layer):
        return layer.weight * scale[layer.rows, None]
    weight, rows = layer.weight, torch.arange(layer.d_out)[layer.rows]
    scales = scale.view(-1, layer.d_in)[rows * (len(scale) // layer.d_in) // layer.d_out]
    return (weight.view(len(weight), layer.d_in, -1) * scales[:, :, None]).view(weight.shape)


def _bias(layer: Layer) -> Tensor:
    return layer.base_bias() * layer["l"].flatten()


IA3 = AdapterType(
    name="IA3",
    equation="diag(l)·W and l ⊙ b, of feed-forward layers W·diag(l)",
    ends={".ia3_l": "l"},
    shapes=_shapes,
    weight=_weight,
    bias=_bias,
    has_bias=lambda layer: not _of_inputs(layer),
    fields=frozenset({"feedforward_modules"}),
    unused=frozenset({"init_ia3_weights"}),
)
