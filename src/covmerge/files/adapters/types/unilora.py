"""Uni-LoRA (arXiv:2506.00799): factors of LoRA whose numbers are all those of one vector, scaled."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, check_places


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("A_indices", 0)
    down, up = (rank, layer.d_in), (layer.d_out, rank)
    numbers = (layer.integer("theta_d_length", 256, least=1),)
    return {"theta": numbers, "A_indices": down, "A": down, "B_indices": up, "B": up}


def _factors(layer: Layer) -> LowRank:
    theta = layer["theta"]
    return LowRank(_side(layer, theta, "B"), _side(layer, theta, "A"))


def _side(layer: Layer, theta: Tensor, side: str) -> Tensor:
    places = layer[f"{side}_indices"].long()
    check_places(layer, places, len(theta))
    return theta[places] * layer[side]


UNILORA = AdapterType(
    name="UNILORA",
    equation="W + B·A, the numbers of both those of one vector at saved places, scaled",
    ends={
        ".unilora_indices_A": "A_indices",
        ".unilora_indices_B": "B_indices",
        ".unilora_scales_A": "A",
        ".unilora_scales_B": "B",
    },
    shared={"unilora_theta_d": "theta"},
    shapes=_shapes,
    factors=_factors,
    rank=lambda layer: layer.rank("A_indices", 0),
    integers=frozenset({"A_indices", "B_indices"}),
    fields=frozenset({"r", "theta_d_length", "save_indices"}),
    unused=frozenset({"proj_seed", "init_theta_d_bound", "unilora_dropout", "init_weights"}),
    refused={
        "save_indices": (
            False,
            "and the places are drawn for the layers in the order of the model's modules, not saved",
        )
    },
)
