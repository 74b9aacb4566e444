"""LoHa (arXiv:2108.06098): the elementwise product of two updates of low rank."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, alpha_of


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    if "t1" not in layer and "t2" not in layer:
        rank = layer.rank("w1_b", 0)
        left, right = (layer.d_out, rank), (rank, layer.columns)
        return {"w1_a": left, "w1_b": right, "w2_a": left, "w2_b": right, **alpha_of(layer)}
    rank, window = layer.rank("t1", 0), cores(layer)
    left, right, core = (rank, layer.d_out), (rank, layer.d_in), (rank, rank, *window)
    shapes = {"w1_a": left, "w1_b": right, "t1": core, "w2_a": left, "w2_b": right, "t2": core}
    return {**shapes, **alpha_of(layer)}


def cores(layer: Layer) -> Shape:
    """Return the window of a Tucker core: PEFT has that of one axis with a second of length 1."""
    window = layer.shape[2:]
    return (*window, 1) if len(window) == 1 and layer.config is not None else window


def tucker(core: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return Σ core_ij · left_i ⊗ right_j, `(rows, d_in, window)`; the window is one axis."""
    flat = core.reshape(*core.shape[:2], -1)
    return torch.einsum("ijk,ip,jq->pqk", flat, left, right)


def update(layer: Layer) -> Tensor:
    """The wanted rows of s (w1_a w1_b) ⊙ (w2_a w2_b)."""
    product = _half(layer, "1").mul_(_half(layer, "2"))
    return product.mul_(layer.scaling(layer.rank("w1_b", 0)))


def _half(layer: Layer, side: str) -> Tensor:
    left, right = layer[f"w{side}_a"], layer[f"w{side}_b"]
    if f"t{side}" not in layer:
        return left[layer.rows] @ right
    return tucker(layer[f"t{side}"], left[:, layer.rows], right).flatten(1)


def matrix(parts: Mapping[str, Shape]) -> tuple[int, int] | None:
    """Return the shape of the update as a matrix, by the shapes of its parts."""
    left, right = parts.get("w1_a", ()), parts.get("w1_b", ())
    if len(left) != 2 or len(right) != 2:
        return None
    core = parts.get("t1")
    return (left[0], right[1]) if core is None else (left[1], right[1] * prod(core[2:]))


LOHA = AdapterType(
    name="LOHA",
    equation="W + s·(w1_a·w1_b) ⊙ (w2_a·w2_b)",
    ends={f".hada_{name}": name for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    marks=frozenset({"w1_a"}),
    shapes=_shapes,
    update=update,
    matrix=matrix,
    alpha="alpha",
    fields=frozenset({"r", "alpha", "rank_pattern", "alpha_pattern"}),
    unused=frozenset({"rank_dropout", "module_dropout", "init_weights", "use_effective_conv2d"}),
)
