"""MiSS, formerly Bone (arXiv:2409.15371): one small matrix, repeated along the layer's inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.integer("r", 64, least=1)
    if _is_bat(layer):
        if layer.d_in % rank or layer.d_out % rank:
            layer.refuse(
                f"is {list(layer.shape)} in the base, which blocks of {rank} do not divide"
            )
        return {"block": (layer.d_out // rank, rank, rank)}
    if rank > layer.d_in:
        layer.refuse(f"has {layer.d_in} inputs, and its matrix {rank} rows")
    mini = layer.option("init_weights") == "mini"
    columns = layer.integer("mini_r", 1, least=1) if mini else layer.d_out
    if layer.d_out % columns:
        layer.refuse(f"has {layer.d_out} outputs, which {columns} columns do not divide")
    return {"block": (rank, columns)}


def _is_bat(layer: Layer) -> bool:
    return layer.option("init_weights") == "bat"


def _weight(layer: Layer) -> Tensor:
    """W + Mᵀ repeated; of "bat" each of the blocks W_jk becomes W_jk + W_jk M_j + M_j. The wanted rows."""
    return _bat(layer) if _is_bat(layer) else layer.weight + _repeated(layer)


def _repeated(layer: Layer) -> Tensor:
    block = layer["block"].T
    repeated = block[torch.arange(layer.d_out)[layer.rows] % len(block)]
    return repeated[:, torch.arange(layer.d_in) % repeated.shape[1]]


def _bat(layer: Layer) -> Tensor:
    blocks, weight = layer["block"], layer.weight
    size = blocks.shape[1]
    found = weight.clone()
    # The wanted rows need not be whole blocks; each row has its own place in one.
    rows = range(*layer.rows.indices(layer.d_out))
    for block in range(rows.start // size, -(-rows.stop // size)):
        first, last = max(rows.start, block * size), min(rows.stop, (block + 1) * size)
        wanted = slice(first - rows.start, last - rows.start)
        apart = weight[wanted].view(last - first, -1, size)
        inside = blocks[block][first - block * size : last - block * size]
        found[wanted] += (apart @ blocks[block] + inside[:, None]).flatten(1)
    return found


MISS = AdapterType(
    name="MISS",
    equation='W + Mᵀ repeated along the inputs; of "bat" W + W·M + M by blocks',
    ends={".miss_block": "block", ".bone_block": "block"},
    shapes=_shapes,
    weight=_weight,
    fields=frozenset({"r", "mini_r", "init_weights"}),
    unused=frozenset({"miss_dropout"}),
)
