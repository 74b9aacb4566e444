"""LoKr (arXiv:2309.14859): the Kronecker product of two small matrices, each of which may be a product."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, alpha_of
from covmerge.files.adapters.types.loha import cores, tucker

_PARTS = ("w1_a", "w1_b", "w1", "w2_a", "w2_b", "w2", "t2")


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rows, columns = _outer(layer)
    if not rows or not columns or layer.d_out % rows or layer.d_in % columns:
        layer.refuse(
            f"is {list(layer.shape)} in the base, and its LoKr has blocks of {rows} x {columns}: pass the "
            "base that the adapter was trained on, or fetch the adapter again"
        )
    inner = (layer.d_out // rows, layer.d_in // columns)
    window = layer.shape[2:]
    found: dict[str, Shape] = alpha_of(layer)
    if "kron_w1" in layer:
        found["kron_w1"] = (rows, columns)
    else:
        rank = layer.size("kron_w1_b", 0)
        found |= {"kron_w1_a": (rows, rank), "kron_w1_b": (rank, columns)}
    if "kron_w2" in layer:
        return {**found, "kron_w2": (*inner, *window)}
    rank = layer.size("kron_w2_b", 0)
    if "kron_t2" in layer:
        core = (rank, rank, *cores(layer))
        return {
            **found,
            "kron_w2_a": (rank, inner[0]),
            "kron_w2_b": (rank, inner[1]),
            "kron_t2": core,
        }
    return {**found, "kron_w2_a": (inner[0], rank), "kron_w2_b": (rank, inner[1] * prod(window))}


def _outer(layer: Layer) -> tuple[int, int]:
    """Rows and columns of the first matrix."""
    if "kron_w1" in layer:
        return layer.size("kron_w1", 0), layer.size("kron_w1", 1)
    return layer.size("kron_w1_a", 0), layer.size("kron_w1_b", 1)


def _scale(layer: Layer) -> float:
    """Return alpha / r; LyCORIS, whose files stand by themselves, has 1 where nothing is a product."""
    if layer.is_older(LOKR):
        return 1.0
    if layer.config is not None:
        return layer.scaling(layer.config.rank(layer.name))
    rank = layer.size("kron_w2_b", 0) or layer.size("kron_w1_b", 0)
    return layer.scaling(rank) if rank else 1.0


def update(layer: Layer) -> Tensor:
    """The wanted rows of s w1 ⊗ w2."""
    first = layer["kron_w1"] if "kron_w1" in layer else layer["kron_w1_a"] @ layer["kron_w1_b"]
    second = _second(layer)
    if layer.config is not None and second.dim() == 3:
        # PEFT gives the product of a 1-d convolution its axes from the right: (1, a, c) with (b, d, k).
        return torch.kron(first[None], second).reshape(layer.d_out, -1)[layer.rows] * _scale(layer)
    rows = torch.arange(layer.d_out)[layer.rows]
    left = (first * _scale(layer))[rows // len(second)]
    right = second.flatten(1)[rows % len(second)]
    return (left[:, :, None] * right[:, None, :]).flatten(1)


def _second(layer: Layer) -> Tensor:
    if "kron_w2" in layer:
        return layer["kron_w2"]
    if "kron_t2" in layer:
        return tucker(layer["kron_t2"], layer["kron_w2_a"], layer["kron_w2_b"]).flatten(1)
    return layer["kron_w2_a"] @ layer["kron_w2_b"]


def matrix(parts: Mapping[str, Shape]) -> tuple[int, int] | None:
    """Return the shape of the update as a matrix, by the shapes of its parts."""
    first = parts.get("kron_w1") or (
        *parts.get("kron_w1_a", (0,))[:1],
        *parts.get("kron_w1_b", (0, 0))[1:],
    )
    second = parts.get("kron_w2")
    if second is None:
        left, right, core = (
            parts.get("kron_w2_a", ()),
            parts.get("kron_w2_b", ()),
            parts.get("kron_t2"),
        )
        if len(left) != 2 or len(right) != 2:
            return None
        second = (left[0], right[1]) if core is None else (left[1], right[1] * prod(core[2:]))
    if len(first) != 2 or len(second) < 2:
        return None
    return first[0] * second[0], first[1] * prod(second[1:])


LOKR = AdapterType(
    name="LOKR",
    equation="W + s·w1 ⊗ w2",
    ends={f".lokr_{name}": f"kron_{name}" for name in _PARTS},
    marks=frozenset(f"kron_{name}" for name in _PARTS),
    shapes=_shapes,
    update=update,
    matrix=matrix,
    alpha="alpha",
    older=(
        "rank_dropout_scale",
        "before 0.14 left alpha out, and newer ones multiply by alpha / r",
    ),
    fields=frozenset({"r", "alpha", "rank_pattern", "alpha_pattern"}),
    unused=frozenset(
        {
            *("rank_dropout", "module_dropout", "init_weights", "use_effective_conv2d"),
            *("rank_dropout_scale", "decompose_both", "decompose_factor"),
        }
    ),
)
