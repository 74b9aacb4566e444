"""Types that rotate or reflect a layer's inputs or outputs: the weight times orthogonal matrices."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import (
    AdapterType,
    Layer,
    Shape,
    block_diagonal_times,
    cayley,
    lengths,
)

# OFT (arXiv:2306.07280; stored as vectors, arXiv:2506.19847): the layer's inputs are rotated in blocks.

_OF_ROWS = "R of rows"
_BEFORE = "R before PEFT 0.15"  # whole matrices, with one factor for each output


def _oft_shapes(layer: Layer) -> Mapping[str, Shape]:
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
    size = _size(numbers) if _shared(layer) else layer.d_in // max(1, blocks)
    if blocks and (
        not size or layer.d_in % size or not (_shared(layer) or layer.d_in == blocks * size)
    ):
        layer.refuse(
            f"has {layer.d_in} inputs, which are not {blocks} blocks: fetch the adapter again"
        )
    return {part: (1 if _shared(layer) else blocks, size * (size - 1) // 2)}


def _part(layer: Layer) -> str:
    """Return the name of the rotations: those of an embedding rotate its rows, others a layer's inputs."""
    return _OF_ROWS if _OF_ROWS in layer else "R"


def _size(numbers: int) -> int:
    """Return the size of skew matrices by how many numbers they have."""
    return (1 + int((1 + 8 * numbers) ** 0.5 + 0.5)) // 2


def _shared(layer: Layer) -> bool:
    return layer.flag("block_share")


def _oft_weight(layer: Layer) -> Tensor:
    """Return the wanted rows of W · blockdiag(R)ᵀ, or of an embedding's W · blockdiag(R)."""
    if _BEFORE in layer:
        stored = layer[_BEFORE]
        return turned(layer, stored.expand(layer.columns // stored.shape[-1], -1, -1))
    weight = layer.weight
    blocks = _rotations(layer).to(weight.dtype)
    if _shared(layer):
        blocks = blocks.expand(layer.d_in // blocks.shape[-1], -1, -1)
    return block_diagonal_times(weight, blocks if _OF_ROWS in layer else blocks.mT)


def _rotations(layer: Layer) -> Tensor:
    """Return R = (I + Q)(I − Q)⁻¹, or the first terms of its series if the adapter was trained so."""
    numbers = layer[_part(layer)].double()
    size = _size(numbers.shape[1])
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
    """Return I + 2Q + 2Q² + … + 2Qᵏ⁻² + Qᵏ⁻¹, k terms; before PEFT 0.18 the last one was not halved."""
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
    """Return the numbers of the skew matrices, their norms limited to eps / √blocks (constrained OFT)."""
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
    shapes=_oft_shapes,
    weight=_oft_weight,
    fields=(
        *("r", "oft_block_size", "coft", "eps", "block_share", "use_cayley_neumann"),
        *("num_cayley_neumann_terms", "module_dropout"),
    ),
    older=("peft_version", "before 0.18 ended the series of rotations otherwise"),
)


# BOFT (arXiv:2311.06243): the layer's inputs are rotated in blocks, and its outputs scaled.


def _boft_shapes(layer: Layer) -> Mapping[str, Shape]:
    factors, blocks = layer.size("R", 0), layer.size("R", 1)
    if factors > 1:
        layer.refuse(
            f"has {factors} butterfly factors, which PEFT computes on CUDA alone: merge it into its base "
            "there with PEFT (model.merge_and_unload()), save the model, and merge full models"
        )
    if not blocks or layer.columns % blocks:
        layer.refuse(
            f"has {layer.columns} inputs, which are not {blocks} blocks: fetch the adapter again"
        )
    size = layer.columns // blocks
    found: dict[str, Shape] = {"R": (1, blocks, size, size), "s": layer.vector("s", layer.d_out)}
    if "P" in layer:  # with one factor it is the identity; PEFT stored it until 0.12
        found["P"] = (1, layer.columns, layer.columns)
    return found


def turned(layer: Layer, stored: Tensor) -> Tensor:
    """Return the wanted rows of s ⊙ W · blockdiag(R)ᵀ, R = (I − Q)(I + Q)⁻¹, Q skew part of `stored`."""
    stored = stored.double()
    rotations = cayley(0.5 * (stored - stored.mT))
    weight = layer.weight
    turned = block_diagonal_times(weight, rotations.mT.to(weight.dtype))
    return turned.mul_(layer["s"].reshape(-1, 1)[layer.rows])


BOFT = AdapterType(
    name="BOFT",
    equation="s ⊙ W·blockdiag(R)ᵀ, R of skew matrices by the Cayley transform",
    ends={".boft_R": "R", ".boft_s": "s", ".boft_P": "P"},
    shapes=_boft_shapes,
    weight=lambda layer: turned(layer, layer["R"][0]),
    fields=("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout"),
)


# HRA (arXiv:2405.17484): the layer's inputs are reflected at r hyperplanes, one after another.


def _hra_weight(layer: Layer) -> Tensor:
    """Return the wanted rows of W Π (I − 2 u uᵀ); `apply_GS` makes the u orthogonal first."""
    normals = layer["u"].double()
    if layer.flag("apply_GS"):
        normals = _orthonormal(normals)
    normals = (normals / lengths(normals, 0)).to(layer["u"].dtype)
    weight = layer.weight.clone()
    for normal in normals.T:
        weight -= torch.outer(2 * (weight @ normal), normal)
    return weight


def _orthonormal(vectors: Tensor) -> Tensor:
    """Return orthonormal vectors by Gram–Schmidt, in the order of the columns."""
    found: list[Tensor] = []
    for vector in vectors.T:
        rest = vector
        for earlier in found:
            rest = rest - (earlier @ rest) * earlier
        found.append(rest / lengths(rest, 0))
    return torch.stack(found, dim=1)


HRA = AdapterType(
    name="HRA",
    equation="W·Π(I − 2·u·uᵀ)",
    ends={".hra_u": "u"},
    shapes=lambda layer: {"u": (layer.columns, layer.rank("u", 1))},
    weight=_hra_weight,
    fields=("r", "apply_GS"),
)


# RoAd (arXiv:2409.00119): the layer's outputs are rotated in pairs and scaled.

_SIZES = {"road_1": 0.5, "road_2": 1, "road_4": 2}  # numbers stored for each output


def _road_shapes(layer: Layer) -> Mapping[str, Shape]:
    variant, group = layer.option("variant", "road_1"), _group(layer)
    if variant not in _SIZES:
        layer.refuse(f"is of variant {variant!r}, and {', '.join(_SIZES)} are read")
    if group % 2 or layer.d_out % group:
        layer.refuse(
            f"has {layer.d_out} outputs, which are not groups of {group}: correct group_size"
        )
    size = (int(layer.d_out * _SIZES[variant]),)
    return {"theta": size, "alpha": size}


def _group(layer: Layer) -> int:
    return layer.integer("group_size", 64, 2)


def _columns(layer: Layer) -> tuple[Tensor, Tensor]:
    """Return α cos θ and α sin θ for every output."""
    theta, alpha = layer["theta"], layer["alpha"]
    variant, group = layer.option("variant", "road_1"), _group(layer)
    if variant == "road_1":  # both halves of a group use the same numbers
        halves = (values.view(-1, 1, group // 2).expand(-1, 2, -1) for values in (theta, alpha))
        theta, alpha = (values.reshape(-1) for values in halves)
    if variant == "road_4":
        theta, alpha = theta.view(-1, 2, group), alpha.view(-1, 2, group)
        first = alpha[:, 0] * theta[:, 0].cos()
        return first.flatten(), (alpha[:, 1] * theta[:, 1].sin()).flatten()
    return alpha * theta.cos(), alpha * theta.sin()


def _rotated(layer: Layer, outputs: Tensor) -> Tensor:
    """Return the rotated rows of a matrix, or numbers of a bias, Eq. 4."""
    rows = outputs.view(layer.d_out, -1)
    halves = rows.view(-1, 2, _group(layer) // 2, rows.shape[1])
    swapped = halves.flip(1)
    swapped[:, 0].neg_()
    first, second = _columns(layer)
    return (rows * first[:, None] + swapped.view(rows.shape) * second[:, None]).view(outputs.shape)


ROAD = AdapterType(
    name="ROAD",
    equation="R·W and R·b, R of scaled rotations of pairs",
    ends={".road_theta": "theta", ".road_alpha": "alpha"},
    shapes=_road_shapes,
    weight=lambda layer: _rotated(layer, layer.weight),
    bias=lambda layer: _rotated(layer, layer.base_bias()),
    by_rows=False,
    fields=("variant", "group_size"),
)

TYPES = (BOFT, HRA, OFT, ROAD)
