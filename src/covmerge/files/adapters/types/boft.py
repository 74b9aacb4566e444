"""BOFT (arXiv:2311.06243): the layer's inputs rotated in blocks, and its outputs scaled."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.adapters.types.layer import (
    AdapterType,
    Layer,
    Shape,
    block_diagonal_times,
    cayley,
)


def _shapes(layer: Layer) -> Mapping[str, Shape]:
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
    if "P" in layer:  # of one factor it is the identity; PEFT stored it until 0.12
        found["P"] = (1, layer.columns, layer.columns)
    return found


def _weight(layer: Layer) -> Tensor:
    return turned(layer, layer["R"][0])


def turned(layer: Layer, stored: Tensor) -> Tensor:
    """The wanted rows of s ⊙ W · blockdiag(R)ᵀ with R = (I − Q)(I + Q)⁻¹, Q the skew part of the stored."""
    stored = stored.double()
    rotations = cayley(0.5 * (stored - stored.mT))
    weight = layer.weight
    turned = block_diagonal_times(weight, rotations.mT.to(weight.dtype))
    return turned.mul_(layer["s"].reshape(-1, 1)[layer.rows])


BOFT = AdapterType(
    name="BOFT",
    equation="s ⊙ W·blockdiag(R)ᵀ, R of skew matrices by the Cayley transform",
    ends={".boft_R": "R", ".boft_s": "s", ".boft_P": "P"},
    shapes=_shapes,
    weight=_weight,
    fields=frozenset({"boft_block_size", "boft_block_num", "boft_n_butterfly_factor"}),
    unused=frozenset({"boft_dropout", "init_weights"}),
)
