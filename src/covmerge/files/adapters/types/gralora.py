"""GraLoRA (arXiv:2505.20355): an update of k × k blocks, each of low rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    parts, rank = layer.size("A", 0), layer.size("A", 2)
    if not parts or layer.d_in % parts or layer.d_out % parts or rank % parts:
        layer.refuse(
            f"is {list(layer.shape)} in the base, which {parts} parts of rank {rank} do not divide: pass "
            "the base that the adapter was trained on"
        )
    found: dict[str, Shape] = {
        "A": (parts, layer.d_in // parts, rank),
        "B": (parts, rank, layer.d_out // parts),
    }
    if hybrid := layer.size("down", 0):
        found |= {"down": (hybrid, layer.d_in), "up": (layer.d_out, hybrid)}
    return found


def _update(layer: Layer) -> Tensor:
    """α/(r + h) times the blocks B_jnᵀ A_njᵀ, and a LoRA of rank h; whole."""
    down, up = layer["A"], layer["B"]
    parts, columns, rank = down.shape
    # Block (j, n) has the j-th part of the terms of A_n, and the n-th of those of B_j.
    left = up.view(parts, parts, rank // parts, -1)
    right = down.view(parts, columns, parts, rank // parts)
    total = _blocks(left, right).view(layer.d_out, layer.d_in)
    hybrid = layer.size("down", 0)
    if hybrid:
        total.addmm_(layer["up"], layer["down"])
    return total.mul_(layer.number("alpha", 64) / (rank + hybrid))


def _blocks(left: Tensor, right: Tensor) -> Tensor:
    """Return the blocks in place, `(j, o, n, i)`."""
    parts, _, _, rows = left.shape
    columns = right.shape[1]
    found = left.new_empty(parts, rows, parts, columns)
    for j in range(parts):
        for n in range(parts):
            found[j, :, n] = left[j, n].T @ right[n, :, j].T
    return found


GRALORA = AdapterType(
    name="GRALORA",
    equation="W + α/(r + h)·(blocks B_jn·A_nj, and a LoRA of rank h)",
    ends={
        ".gralora_A_general.weight": "down",
        ".gralora_B_general.weight": "up",
        ".gralora_A": "A",
        ".gralora_B": "B",
    },
    shapes=_shapes,
    update=_update,
    by_rows=False,
    fields=frozenset({"r", "alpha", "gralora_k", "hybrid_r"}),
    unused=frozenset({"gralora_dropout", "init_weights"}),
)
