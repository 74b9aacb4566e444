"""OFT and BOFT of Kohya's and LyCORIS's files: the layer's outputs rotated in blocks, and scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import (
    ALPHA,
    AdapterType,
    Layer,
    Shape,
    alpha_of,
    cayley,
)

_linalg: Any = torch.linalg  # torch carries no types for it


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    stored = layer.parts["blocks"].shape
    size = stored[-1] if stored else 0
    count = layer.d_out // size if size else 0
    if len(stored) not in (3, 4) or count * size != layer.d_out:
        layer.refuse(f"has {layer.d_out} outputs, which its blocks {list(stored)} do not divide")
    if len(stored) == 4 and (size % 2 or layer.d_out % (2 ** (stored[0] - 1) * size)):
        layer.refuse(f"has {layer.d_out} outputs, of which {list(stored)} is no butterfly")
    found: dict[str, Shape] = {"blocks": (*stored[:-3], count, size, size), **alpha_of(layer)}
    if "rescale" in layer:
        found["rescale"] = layer.vector("rescale", layer.d_out)
    return found


def _weight(layer: Layer) -> Tensor:
    """Rᵀ W by blocks of rows, or a butterfly of such steps with R; whole."""
    weight = layer.weight
    rotations = _rotations(layer).to(weight.dtype)
    if rotations.dim() == 3:
        weight = _turned(rotations.mT, weight)
    else:
        for step, blocks in enumerate(rotations):
            weight = _butterfly(blocks, weight, 2**step * blocks.shape[-1] // 2)
    return weight.mul_(layer["rescale"].reshape(-1, 1)) if "rescale" in layer else weight


def _rotations(layer: Layer) -> Tensor:
    """(I + Q)(I − Q)⁻¹ of Q = X − Xᵀ, which alpha · d_out bounds; of no alpha, and of 0, nothing does."""
    stored = layer["blocks"].double()
    skew = stored - stored.mT
    limit = float(layer[ALPHA]) * layer.d_out if ALPHA in layer else 0.0
    norm = float(_linalg.vector_norm(skew)) + 1e-8
    return cayley(-skew * (limit / norm if 0 < limit < norm else 1.0))


def _turned(blocks: Tensor, rows: Tensor) -> Tensor:
    return torch.bmm(blocks, rows.view(len(blocks), -1, rows.shape[1])).view(rows.shape)


def _butterfly(blocks: Tensor, rows: Tensor, stride: int) -> Tensor:
    """Blocks of pairs of rows that are a stride apart."""
    pairs = rows.view(-1, 2, stride, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    turned = _turned(blocks, pairs).view(-1, stride, 2, rows.shape[1])
    return turned.transpose(1, 2).reshape(rows.shape)


LYCORIS_OFT = AdapterType(
    name="OFT, BOFT (`oft_blocks`, `rescale`)",
    equation="s ⊙ blockdiag(R)ᵀ·W, or a butterfly of blocks; R of skew matrices by the Cayley transform",
    ends={".oft_blocks": "blocks", ".rescale": "rescale"},
    marks=frozenset({"blocks"}),
    shapes=_shapes,
    weight=_weight,
    by_rows=False,
)
