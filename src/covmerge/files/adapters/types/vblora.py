"""VB-LoRA (arXiv:2405.15179): factors of LoRA put together of the vectors of one bank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, check_places


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    count, length = layer.size("bank", 0), layer.size("bank", 1)
    if not length or layer.d_in % length or layer.d_out % length:
        layer.refuse(
            f"is {list(layer.shape)} in the base, which vectors of {length} do not divide: pass the base "
            "that the adapter was trained on"
        )
    topk = layer.integer("topk", 2, 1)
    rank = _rank(layer)
    down, up = (rank, layer.d_in // length), (layer.d_out // length, rank)
    found: dict[str, Shape] = {"bank": (count, length)}
    for side, tiles in (("A", down), ("B", up)):
        if f"{side}_indices" in layer:
            found |= {f"{side}_indices": (*tiles, topk), f"{side}_weights": (*tiles, topk - 1)}
        else:
            found[side] = (*tiles, count)
    return found


def _rank(layer: Layer) -> int:
    return layer.size("A", 0) or layer.size("A_indices", 0)


def _factors(layer: Layer) -> LowRank:
    rank = _rank(layer)
    down = _vectors(layer, "A").reshape(rank, layer.d_in)
    up = _vectors(layer, "B").transpose(1, 2).reshape(layer.d_out, rank)
    return LowRank(up, down)


def _vectors(layer: Layer, side: str) -> Tensor:
    """Sums of the k vectors of the largest logits, weighted by the softmax of these."""
    bank, topk = layer["bank"], layer.integer("topk", 2, 1)
    if f"{side}_indices" in layer:
        indices, weights = layer[f"{side}_indices"].long(), layer[f"{side}_weights"]
        weights = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], dim=-1)
    else:
        if topk > len(bank):
            layer.refuse(
                f"is put together of {topk} vectors of a bank of {len(bank)}: correct topk"
            )
        logits, indices = layer[side].topk(topk, dim=-1)
        weights = logits.softmax(dim=-1)
    check_places(layer, indices, len(bank))
    total = bank.new_zeros(*indices.shape[:-1], bank.shape[1])
    for i in range(indices.shape[-1]):
        total += weights[..., i, None].to(bank.dtype) * bank[indices[..., i]]
    return total


_PARTS = {"": "", "_topk_indices": "_indices", "_topk_weights": "_weights"}
VBLORA = AdapterType(
    name="VBLORA",
    equation="W + B·A, both of the bank's vectors with the largest logits",
    ends={f".vblora_logits_{s}{end}": f"{s}{p}" for s in "AB" for end, p in _PARTS.items()},
    shared={"vblora_vector_bank": "bank"},
    shapes=_shapes,
    factors=_factors,
    rank=_rank,
    integers=frozenset({"A_indices", "B_indices"}),
    fields=frozenset({"r", "topk", "num_vectors", "vector_length", "save_only_topk_weights"}),
    unused=frozenset(
        {"vblora_dropout", "init_vector_bank_bound", "init_logits_std", "init_weights"}
    ),
)
