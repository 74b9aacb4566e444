"""PiSSA (arXiv:2404.02948) and OLoRA (arXiv:2406.01775): LoRA that began as a part of the weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape
from covmerge.files.adapters.types.locon import LOCON
from covmerge.files.adapters.types.spectral import without_components

_linalg: Any = torch.linalg  # torch carries no types for it


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    if len(layer.shape) != 2:
        layer.refuse("is no linear layer, and PEFT begins no other as a part of the weight")
    return LOCON.shapes(layer)


def _without_first(layer: Layer) -> Tensor:
    """W − the r largest singular components."""
    return without_components(layer.weight, layer.size("down", 0), smallest=False)


def _without_columns(layer: Layer) -> Tensor:
    """W − s Q_r R_r of W = Q R: what lies in the span of the first r columns."""
    weight, rank = layer.weight, layer.size("down", 0)
    basis = _linalg.qr(weight[:, :rank].double())[0].to(weight.dtype)
    return weight.addmm_(basis, basis.T @ weight, alpha=-layer.scaling(rank))


def _begun(name: str, equation: str, rest: Callable[[Layer], Tensor]) -> AdapterType:
    update = LOCON.update
    assert update is not None

    def weight(layer: Layer) -> Tensor:
        return rest(layer).add_(update(layer))

    return replace(
        LOCON,
        name=name,
        equation=equation,
        shapes=_shapes,
        update=None,
        weight=weight,
        by_rows=False,
    )


PISSA = _begun(
    "LORA (PiSSA)", "W without its r largest singular components, + s·B·A", _without_first
)
OLORA = _begun("LORA (OLoRA)", "W − s·Q_r·R_r + s·B·A, Q and R those of W", _without_columns)
