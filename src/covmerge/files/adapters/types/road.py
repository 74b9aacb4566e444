"""RoAd (arXiv:2409.00119): the layer's outputs, rotated in pairs and scaled."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

_SIZES = {"road_1": 0.5, "road_2": 1, "road_4": 2}  # numbers for each output


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    variant, group = layer.option("variant", "road_1"), _group(layer)
    if variant not in _SIZES:
        layer.refuse(f"is of variant {variant!r}, and {', '.join(_SIZES)} are read")
    if group % 2 or layer.d_out % group:
        layer.refuse(
            f"has {layer.d_out} outputs, which are not groups of {group}: correct group_size"
        )
    size = (int(layer.d_out * _SIZES[variant]),)
    return {"theta": size, "alpha": size}


def _group(layer: Layer) -> int:
    return layer.integer("group_size", 64, 2)


def _columns(layer: Layer) -> tuple[Tensor, Tensor]:
    """α cos θ and α sin θ, one of each for every output."""
    theta, alpha = layer["theta"], layer["alpha"]
    variant, group = layer.option("variant", "road_1"), _group(layer)
    if variant == "road_1":  # both halves of a group have the same
        halves = (values.view(-1, 1, group // 2).expand(-1, 2, -1) for values in (theta, alpha))
        theta, alpha = (values.reshape(-1) for values in halves)
    if variant == "road_4":
        theta, alpha = theta.view(-1, 2, group), alpha.view(-1, 2, group)
        first = alpha[:, 0] * theta[:, 0].cos()
        return first.flatten(), (alpha[:, 1] * theta[:, 1].sin()).flatten()
    return alpha * theta.cos(), alpha * theta.sin()


def _rotated(layer: Layer, outputs: Tensor) -> Tensor:
    """Eq. 4, over the rows of a matrix or the numbers of a bias."""
    rows = outputs.view(layer.d_out, -1)
    halves = rows.view(-1, 2, _group(layer) // 2, rows.shape[1])
    swapped = halves.flip(1)
    swapped[:, 0].neg_()
    first, second = _columns(layer)
    return (rows * first[:, None] + swapped.view(rows.shape) * second[:, None]).view(outputs.shape)


ROAD = AdapterType(
    name="ROAD",
    equation="R·W and R·b, R of scaled rotations of pairs",
    ends={".road_theta": "theta", ".road_alpha": "alpha"},
    shapes=_shapes,
    weight=lambda layer: _rotated(layer, layer.weight),
    bias=lambda layer: _rotated(layer, layer.base_bias()),
    by_rows=False,
    fields=frozenset({"variant", "group_size"}),
    unused=frozenset({"init_weights"}),
)
