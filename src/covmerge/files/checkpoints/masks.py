"""masks/<expert>.safetensors: one bit per element and expert, beside a unified model."""

from __future__ import annotations

import torch

from covmerge.base.types import TensorHeader

MASKS_FOLDER = "masks"


def packed_header(header: TensorHeader) -> TensorHeader:
    """Header of the packed mask of a tensor."""
    shape = header.shape
    if len(shape) > 1:
        shape = (*shape[:-1], -(-shape[-1] // 8))
    return TensorHeader(header.name, shape, torch.uint8)
