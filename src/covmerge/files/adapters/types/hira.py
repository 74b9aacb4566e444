"""HiRA (ICLR 2025): the weight times one more than a matrix of low rank, elementwise."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank, window = layer.size("down", 0), layer.shape[2:]
    # PEFT 0.21.2 makes every part of rank r, whatever rank_pattern says.
    if rank != layer.option("r"):
        rank = layer.rank("down", 0)
    return {
        "down": (rank, layer.d_in, *window),
        "up": (layer.d_out, rank, *(1 for _ in window)),
    }


def _weight(layer: Layer) -> Tensor:
    """W ⊙ (1 + B A), the wanted rows."""
    rank = layer.size("down", 0)
    up = layer["up"].reshape(layer.d_out, rank)[layer.rows]
    weight = layer.weight
    return weight.addcmul(weight, up @ layer["down"].reshape(rank, -1))


HIRA = AdapterType(
    name="HIRA",
    equation="W ⊙ (1 + B·A)",
    ends={
        ".hira_embedding_A": "table_down",
        ".hira_embedding_B": "table_up",
        ".hira_A": "down",
        ".hira_B": "up",
    },
    shapes=_shapes,
    weight=_weight,
    fields=frozenset({"r", "rank_pattern"}),
    unused=frozenset({"hira_dropout", "init_weights"}),
)
