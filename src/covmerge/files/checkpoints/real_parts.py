"""Complex tensors seen as their real and imaginary parts, which are merged as any other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, find_header
from covmerge.files.checkpoints.view import View


class RealParts(View):
    """A view of a checkpoint in which complex tensors have one more axis: real and imaginary part.

    Args:
        stored: the checkpoint.
    """

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        self.source = stored.source
        self.config: Mapping[str, Any] | None = stored.config
        self.notes = stored.notes
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: _in_parts(header) for name, header in stored.headers.items()}
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        header = find_header(self.headers, name, rows, self.source)
        if not header.complex:
            return self._stored.read(name, rows)
        if len(header.shape) == 1 and rows is not None:  # of one number, which has no rows
            return torch.view_as_real(self._stored.read(name))[rows.start : rows.stop]
        return torch.view_as_real(self._stored.read(name, rows))


def in_real_parts(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without complex tensors; often it is the same. An adapter stays as it is.

    Example:
        >>> from covmerge.files.checkpoints.open import open_checkpoint
        >>> held = in_real_parts(open_checkpoint({"w": torch.tensor([1 + 2j])}))
        >>> held.headers["w"].shape, held.read("w")
        ((1, 2), tensor([[1., 2.]]))
    """
    plain = not any(header.dtype.is_complex for header in checkpoint.headers.values())
    if plain or checkpoint.is_adapter:
        return checkpoint
    return RealParts(checkpoint)


def _in_parts(header: TensorHeader) -> TensorHeader:
    if not header.dtype.is_complex:
        return header
    return replace(header, shape=(*header.shape, 2), dtype=header.dtype.to_real(), complex=True)
