"""KaSA (arXiv:2412.06071): LoRA with singular values, over a weight without its smallest ones."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape
from covmerge.files.adapters.types.spectral import without_components

DIAGONAL = "diagonal"


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("down", 0)
    if len(layer.shape) != 2 or rank >= min(layer.shape):
        layer.refuse(f"is {list(layer.shape)} in the base, of which KaSA takes {rank} away")
    return {"down": (rank, layer.d_in), "up": (layer.d_out, rank), DIAGONAL: (rank,)}


def _weight(layer: Layer) -> Tensor:
    """W without its r smallest singular components, + s B diag(d) A."""
    diagonal = layer[DIAGONAL]
    rank = len(diagonal)
    weight = without_components(layer.weight, rank, smallest=True)
    return weight.addmm_(layer["up"] * (diagonal * layer.scaling(rank)), layer["down"])


KASA = AdapterType(
    name="LORA (KaSA)",
    equation="W without its r smallest singular components, + s·B·diag(d)·A",
    ends={},  # those of LoRA
    shapes=_shapes,
    weight=_weight,
    by_rows=False,
)
