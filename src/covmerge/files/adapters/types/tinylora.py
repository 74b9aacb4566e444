"""TinyLoRA (arXiv:2602.04118): a few numbers that mix random matrices between frozen factors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank, count = layer.size("A", 0), layer.integer("u", 64, least=1)
    vectors: dict[str, Shape] = {part: (count,) for part in layer.parts if part.startswith("v.")}
    shapes: dict[str, Shape] = {"A": (rank, layer.d_in), "B": (layer.d_out, rank)}
    return {**shapes, "P": (count, rank, rank), **vectors}


def _factors(layer: Layer) -> LowRank:
    """B · Σ v_i P_i · A."""
    mixed = torch.einsum("i,ijk->jk", layer[f"v.{_group(layer)}"], layer["P"])
    return LowRank(layer["B"] @ mixed, layer["A"])


def _group(layer: Layer) -> int:
    """Which of the vectors the layer has: layers share them in the order of the model's modules."""
    tying = layer.number("weight_tying", 0.0)
    groups = max(1, round(layer.count * (1 - tying)))
    if any(f"v.{number}" not in layer for number in range(groups)):
        layer.refuse(f"is one of {layer.count} that share {groups} vectors, and fewer are stored")
    return 0 if groups == 1 else min(_place(layer) // max(1, layer.count // groups), groups - 1)


def _place(layer: Layer) -> int:
    """Its number among the layers, by which its random matrices were drawn."""
    stored = layer["P"]
    seed = layer.integer("projection_seed", 42)
    for number in range(layer.count):
        if torch.allclose(_drawn(seed + number, stored), stored, rtol=1e-2, atol=1e-2):
            return number
    layer.refuse(
        "has random matrices that torch does not draw here from any layer's seed, so that its vector is "
        "not known: merge it into its base with PEFT (model.merge_and_unload()), save the model, and merge "
        "full models"
    )


def _drawn(seed: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    std = like.shape[1] ** -0.5
    return torch.normal(0.0, std, like.shape, generator=generator).to(like.dtype)


TINYLORA = AdapterType(
    name="TINYLORA",
    equation="W + B·(Σ v_i·P_i)·A, A, B and P saved, v by the layer's place",
    ends={".tinylora_A": "A", ".tinylora_B": "B", ".tinylora_P": "P"},
    shared={"tinylora_v.": "v."},
    shapes=_shapes,
    factors=_factors,
    rank=lambda layer: layer.size("A", 0),
    fields=frozenset({"r", "u", "weight_tying", "projection_seed", "save_projection"}),
    unused=frozenset({"tinylora_dropout", "init_weights", "init_v_bound"}),
    refused={
        "save_projection": (
            False,
            "so that nothing tells a layer's place among the model's modules, which its vector goes by",
        )
    },
)
