"""DoRA (arXiv:2402.09353): an update for the direction of a layer's rows, and a magnitude of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, lengths

MAGNITUDE = "magnitude"


@cache
def with_magnitude(kind: AdapterType, *, columns: bool = False) -> AdapterType:
    """Return the type whose update gives the direction, and a vector the lengths of rows, Eq. 5.

    Args:
        kind: what gives the direction.
        columns: the lengths are those of the inputs' weights, as LyCORIS has it with wd_on_out=False.
    """

    def shapes(layer: Layer) -> Mapping[str, Shape]:
        length = layer.d_in if columns else layer.d_out
        return {**kind.shapes(layer), MAGNITUDE: layer.vector(MAGNITUDE, length)}

    def direction(layer: Layer) -> Tensor:
        if kind.weight is not None:
            return kind.weight(layer)
        if kind.update is None:
            layer.refuse(f"has a magnitude, which no {kind.name} has: fetch the adapter again")
        return layer.weight.add_(kind.update(layer))

    def weight(layer: Layer) -> Tensor:
        return _rescaled(layer, direction(layer), columns=columns)

    return replace(
        kind,
        name=f"{kind.name} with magnitudes (DoRA)",
        equation=f"m ⊙ V / ‖V‖ by {'columns' if columns else 'rows'}, V = {kind.equation}",
        shapes=shapes,
        update=None,
        factors=None,
        weight=weight,
        by_rows=kind.by_rows and not columns,
    )


def _rescaled(layer: Layer, weight: Tensor, *, columns: bool) -> Tensor:
    if not columns:
        return weight.mul_(layer[MAGNITUDE].reshape(-1, 1)[layer.rows] / lengths(weight, 1))
    channels = weight.view(layer.d_out, layer.d_in, -1)
    scales = layer[MAGNITUDE].view(1, -1, 1) / lengths(channels, 0, 2)
    return channels.mul_(scales).view(weight.shape)
