"""Super-Tuning (arXiv:2607.09287): a sparse update at chosen places, with or without a LoRA."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, check_places


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("values", 0)
    found: dict[str, Shape] = {"values": (count,), "indices": (count,)}
    if layer.option("r"):
        rank = layer.rank("down", 0)
        found |= {"down": (rank, layer.d_in), "up": (layer.d_out, rank)}
    return found


def _update(layer: Layer) -> Tensor:
    """The numbers at their places, + α/r · B A; whole."""
    values, places = layer["values"], layer["indices"].long()
    check_places(layer, places, layer.d_out * layer.d_in)
    dense = torch.zeros(layer.d_out * layer.d_in, dtype=values.dtype)
    found = dense.index_add_(0, places, values).view(layer.d_out, layer.d_in)
    if layer.option("r"):
        rank = layer.rank("down", 0)
        found.addmm_(layer["up"] * (layer.number("lora_alpha", 4) / rank), layer["down"])
    return found


SUPERTUNING = AdapterType(
    name="SUPERTUNING",
    equation="W + a sparse matrix, and α/r·B·A",
    ends={
        ".supertuning_values": "values",
        ".supertuning_indices": "indices",
        ".supertuning_lora_A.weight": "down",
        ".supertuning_lora_B.weight": "up",
    },
    shapes=_shapes,
    update=_update,
    by_rows=False,
    integers=frozenset({"indices"}),
    fields=frozenset({"r", "lora_alpha", "save_precomputed_indices"}),
    unused=frozenset({"sparsity", "select_top", "init_weights", "lora_dropout"}),
    refused={
        "save_precomputed_indices": (
            False,
            "and the places are those of the base's largest numbers, of which several may be equal",
        )
    },
)
