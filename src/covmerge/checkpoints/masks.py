"""masks/<expert>.safetensors: one bit per element and expert, beside a unified model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from covmerge.checkpoints.disk import disk_errors
from covmerge.checkpoints.layout import Layout, plan_shard
from covmerge.checkpoints.writer import ShardWriter
from covmerge.types import TensorHeader

MASKS_FOLDER = "masks"


def pack(mask: Tensor) -> Tensor:
    """Pack a boolean tensor into uint8, eight to a byte along the last axis.

    Rows stay apart, so that blocks of rows can be packed by themselves; a tensor with one axis keeps
    a byte per element.

    Example:
        >>> pack(torch.tensor([[True, False, True]])).tolist()
        [[160]]
    """
    if mask.dim() < 2:
        return mask.to(torch.uint8)
    return torch.as_tensor(np.packbits(mask.numpy(), axis=-1))


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the boolean tensor of this shape that was packed.

    Example:
        >>> unpack(torch.tensor([[160]], dtype=torch.uint8), (1, 3)).tolist()
        [[True, False, True]]
    """
    if len(shape) < 2:
        return packed.to(torch.bool)
    bits = np.unpackbits(packed.numpy(), axis=-1, count=shape[-1])
    return torch.as_tensor(bits).to(torch.bool)


class MaskWriter:
    """The mask files of all experts, being filled, in any order and by any rows.

    Args:
        folder: folder of the output.
        headers: tensors that have masks.
        experts: names of the experts.

    Raises:
        ResourceError: the disk is full.
    """

    def __init__(
        self, folder: Path, headers: Sequence[TensorHeader], experts: Sequence[str]
    ) -> None:
        target = folder / MASKS_FOLDER
        with disk_errors(target):
            target.mkdir(exist_ok=True)
        packed = [packed_header(header) for header in headers]
        self._writers: Mapping[str, ShardWriter] = {
            expert: ShardWriter(target, Layout((plan_shard(f"{expert}.safetensors", packed),)))
            for expert in experts
        }

    def write(self, name: str, rows: range | None, masks: Mapping[str, Tensor]) -> str:
        """Write the masks of some rows; experts without one have an empty mask there."""
        return " ".join(
            writer.write(name, pack(masks[expert]), rows)
            for expert, writer in self._writers.items()
            if expert in masks
        )

    def read_back(self, name: str, rows: range | None, experts: Sequence[str]) -> str:
        """Return the checksum of what the files hold for some rows, as `write` does."""
        return " ".join(self._writers[expert].read_back(name, rows) for expert in experts)

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        for writer in self._writers.values():
            writer.flush()


def packed_header(header: TensorHeader) -> TensorHeader:
    """Header of the packed mask of a tensor."""
    shape = header.shape
    if len(shape) > 1:
        shape = (*shape[:-1], -(-shape[-1] // 8))
    return TensorHeader(header.name, shape, torch.uint8)
