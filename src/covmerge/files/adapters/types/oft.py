"""OFT (arXiv:2306.07280, as rows of vectors arXiv:2506.19847): the layer's inputs, rotated in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from covmerge.files.adapters.types.boft import turned
from covmerge.files.adapters.types.layer import (
    AdapterType,
    Layer,
    Shape,
    block_diagonal_times,
    cayley,
    lengths,
)

_OF_ROWS = "R of rows"
_BEFORE = "R before PEFT 0.15"  # of whole matrices, with a factor of each output


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    if _BEFORE in layer:
        if "s" not in layer or layer.flag("coft"):
            release = "0.14.0" if "s" in layer else "0.13.2"
            layer.refuse(
                f"has OFT as only older PEFTs compute it: merge it into its base with peft {release} "
                "(model.merge_and_unload()), save the model, and merge full models"
            )
        size = layer.size(_BEFORE, 1)
        if not size or layer.columns % size:
            layer.refuse(
                f"has {layer.columns} inputs, which blocks of {size} do not divide: fetch the adapter again"
            )
        blocks = 1 if _shared(layer) else layer.columns // size
        return {_BEFORE: (blocks, size, size), "s": layer.vector("s", layer.d_out)}
    if prod(layer.shape[2:]) != 1:
        layer.refuse(
            "is a convolution with a window, and PEFT rotates all patches of its input before they are "
            "added up again, which no kernel of that window does: train without that layer"
        )
    part = _part(layer)
    blocks, numbers = layer.size(part, 0), layer.size(part, 1)
    size = layer.d_in if not blocks else layer.d_in // (1 if _shared(layer) else blocks)
    if _shared(layer):
        size = (1 + _root(1 + 8 * numbers)) // 2
    if blocks and (layer.d_in % size or (not _shared(layer) and layer.d_in != blocks * size)):
        layer.refuse(
            f"has {layer.d_in} inputs, which are not {blocks} blocks: fetch the adapter again"
        )
    return {part: (1 if _shared(layer) else blocks, size * (size - 1) // 2)}


def _part(layer: Layer) -> str:
    """What the rotations are called: those of an embedding turn its rows, not what a layer sees."""
    return _OF_ROWS if _OF_ROWS in layer else "R"


def _root(number: int) -> int:
    return int(number**0.5 + 0.5)


def _shared(layer: Layer) -> bool:
    return layer.flag("block_share")


def _weight(layer: Layer) -> Tensor:
    """W · blockdiag(R)ᵀ, of an embedding W · blockdiag(R); the wanted rows."""
    if _BEFORE in layer:
        stored = layer[_BEFORE]
        return turned(layer, stored.expand(layer.columns // stored.shape[-1], -1, -1))
    weight = layer.weight
    blocks = _rotations(layer).to(weight.dtype)
    if _shared(layer):
        blocks = blocks.expand(layer.d_in // blocks.shape[-1], -1, -1)
    return block_diagonal_times(weight, blocks if _OF_ROWS in layer else blocks.mT)


def _rotations(layer: Layer) -> Tensor:
    """R = (I + Q)(I − Q)⁻¹, or the first terms of its series, as the adapter was trained."""
    numbers = layer[_part(layer)].double()
    size = (1 + _root(1 + 8 * numbers.shape[1])) // 2
    if layer.flag("coft"):
        numbers = _projected(numbers, layer.number("eps", 6e-5))
    rows, columns = torch.triu_indices(size, size, 1)
    skew = numbers.new_zeros(len(numbers), size, size)
    skew[:, rows, columns] = numbers
    skew = skew - skew.mT
    if layer.option("use_cayley_neumann") is None:
        layer.refuse(
            "was trained by a PEFT whose adapter_config.json does not say whether the rotations are a "
            "series: add use_cayley_neumann (and num_cayley_neumann_terms) as it was in training"
        )
    if not layer.flag("use_cayley_neumann"):
        return cayley(skew)
    terms = layer.integer("num_cayley_neumann_terms", 5)
    return _series(skew, terms, halved=not layer.is_older(OFT))


def _series(skew: Tensor, terms: int, *, halved: bool) -> Tensor:
    """I + 2Q + 2Q² + … + 2Qᵏ⁻² + Qᵏ⁻¹ of k terms; before PEFT 0.18 the last was not halved."""
    total = torch.eye(skew.shape[-1], dtype=skew.dtype).repeat(len(skew), 1, 1)
    if terms > 1:
        total += 2 * skew
    if terms > 2:
        power = skew @ skew
        total += 2 * power
        for _ in range(3, terms - halved):
            power = power @ skew
            total += 2 * power
        if halved:
            total += power @ skew
    return total


def _projected(numbers: Tensor, eps: float) -> Tensor:
    """Constrained OFT: the skew matrices no longer than eps / √blocks."""
    norms = lengths(numbers, 1) * 2**0.5
    limit = eps / len(numbers) ** 0.5
    return torch.where(norms <= limit, numbers, numbers * (limit / norms))


OFT = AdapterType(
    name="OFT",
    equation="W·blockdiag(R)ᵀ, R of skew matrices by the Cayley transform or its series",
    ends={
        ".oft_R.weight": "R",
        ".oft_embedding_R.weight": _OF_ROWS,
        ".oft_r": _BEFORE,
        ".oft_s": "s",
    },
    shapes=_shapes,
    weight=_weight,
    fields=frozenset(
        {
            *("r", "oft_block_size", "coft", "eps", "block_share"),
            *("use_cayley_neumann", "num_cayley_neumann_terms"),
        }
    ),
    unused=frozenset({"module_dropout", "init_weights"}),
    older=("peft_version", "before 0.18 ended the series of rotations otherwise"),
)
