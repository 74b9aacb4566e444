"""GLoRA (arXiv:2306.07967): the weight scaled and shifted, and the bias by both and by the weight."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

_NONE = "zeros"  # what PEFT stores of a part that is off


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    d_out, d_in = layer.d_out, layer.d_in
    matrix = _path(layer, "A", "config_A_B", (d_out, d_in)) | _path(
        layer, "B", "config_A_B", (d_out, d_in)
    )
    bias = _path(layer, "D", "config_D_E", (d_out,)) | _path(layer, "E", "config_D_E", (d_out,))
    return matrix | _path(layer, "C", "config_C", (d_in, 1)) | bias


def _path(layer: Layer, side: str, field: str, shape: Shape) -> dict[str, Shape]:
    """The tensors of one of the five parts."""
    if f"{side}.{_NONE}" in layer:
        return {f"{side}.{_NONE}": shape}
    if f"{side}.Xd" in layer:
        rank = layer.rank(f"{side}.Xd", 1)
        return {f"{side}.Xd": (shape[0], rank), f"{side}.Xu": (rank, *shape[1:])}
    constant = layer.option(field) == "constant"
    return {f"{side}.X": (1,) if constant else (shape[0], *(1 for _ in shape[1:]))}


def _value(layer: Layer, side: str, rows: slice = slice(None)) -> Tensor:
    """What broadcasts to a part, some rows of it."""
    if f"{side}.Xd" in layer:
        return layer[f"{side}.Xd"][rows] @ layer[f"{side}.Xu"]
    value = layer[f"{side}.X"] if f"{side}.X" in layer else layer[f"{side}.{_NONE}"]
    return value if len(value) == 1 else value[rows]


def _weight(layer: Layer) -> Tensor:
    """W ⊙ (1 + A) + B, the wanted rows."""
    weight = layer.weight
    return weight.addcmul(weight, _value(layer, "A", layer.rows)).add_(
        _value(layer, "B", layer.rows)
    )


def _bias(layer: Layer) -> Tensor:
    """B ⊙ (1 + D) + E + W C."""
    bias = layer.base_bias()
    product = (layer.weight @ _value(layer, "C")).flatten()
    return bias + bias * _value(layer, "D") + _value(layer, "E") + product


GLORA = AdapterType(
    name="GLORA",
    equation="W ⊙ (1 + A) + B, and b ⊙ (1 + D) + E + W·C",
    ends={
        f".glora_{side}.{end}": f"{side}.{end}"
        for side in "ABCDE"
        for end in ("Xd", "Xu", "X", _NONE)
    },
    shapes=_shapes,
    weight=_weight,
    bias=_bias,
    has_bias=lambda layer: any(f"{side}.{_NONE}" not in layer for side in "CDE"),
    adds_bias=True,
    fields=frozenset({"r", "config_A_B", "config_C", "config_D_E"}),
    unused=frozenset({"init_weights"}),
)
