"""(IA)³ of LyCORIS's files: outputs or inputs times one more than a number each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

ON_INPUT, SCALES = "on input", "scales"


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    length = layer.d_in if _of_inputs(layer) else layer.d_out
    return {ON_INPUT: layer.vector(ON_INPUT, 1), SCALES: layer.vector(SCALES, length)}


def _of_inputs(layer: Layer) -> bool:
    if ON_INPUT not in layer or layer.parts[ON_INPUT].numel != 1:
        layer.refuse("has no one number `on_input`, which says what its scales are of")
    return bool(layer[ON_INPUT].item())


def _weight(layer: Layer) -> Tensor:
    """diag(1 + w) W, or W diag(1 + w), the wanted rows; the bias stays as it is."""
    scale = layer[SCALES].flatten() + 1
    weight = layer.weight
    if not _of_inputs(layer):
        return weight.mul_(scale[layer.rows, None])
    return weight.view(len(weight), layer.d_in, -1).mul_(scale[:, None]).view(weight.shape)


LYCORIS_IA3 = AdapterType(
    name="(IA)³ (`weight`, `on_input`)",
    equation="diag(1 + w)·W, or W·diag(1 + w)",
    ends={".on_input": ON_INPUT},
    marks=frozenset({ON_INPUT}),
    beside={".weight": SCALES},
    shapes=_shapes,
    weight=_weight,
    flags=frozenset({ON_INPUT}),
)
