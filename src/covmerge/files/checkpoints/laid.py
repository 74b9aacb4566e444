"""Tensors as a pickle describes them: laid over a storage, by shape and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pickle import UnpicklingError

import torch
from torch import Tensor


class _Fixed:
    """What a pickle is given, and cannot change: it could set `__dict__` past what keeps others out."""

    def __setstate__(self, state: object) -> None:
        raise UnpicklingError("the pickle sets the state of a tensor or of its storage")


@dataclass(frozen=True)
class Storage(_Fixed):
    """Numbers of one dtype in the file; `read(first, count)` returns the bytes of some of them.

    `start` is the byte of the file at which they begin, where they lie in it as they are.
    """

    dtype: torch.dtype
    count: int
    read: Callable[[int, int], bytes]
    start: int | None = None


@dataclass(frozen=True)
class Laid(_Fixed):
    """A tensor that is laid over a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its numbers."""
        return self.storage.dtype

    def span(self, rows: range | None = None) -> tuple[int, tuple[int, ...], int]:
        """Return where (rows of) it begin in the storage, their shape, and how many numbers they span."""
        first, shape = self.offset, self.shape
        if rows is not None:
            first, shape = first + rows.start * self.strides[0], (len(rows), *shape[1:])
        spanned = sum((n - 1) * step for n, step in zip(shape, self.strides, strict=True)) + 1
        return first, shape, spanned

    def tensor(self, rows: range | None = None) -> Tensor:
        """Read (rows of) it into memory of its own, and of its storage what lies between.

        Raises:
            CheckpointError: the file ends early.
        """
        first, shape, spanned = self.span(rows)
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        data = bytearray(self.storage.read(first, spanned))
        # As bytes, truth values stay as they are stored, whatever they are.
        dtype = torch.uint8 if self.dtype is torch.bool else self.dtype
        laid = torch.as_strided(torch.frombuffer(data, dtype=dtype), shape, self.strides)
        return laid.clone(memory_format=torch.contiguous_format).view(self.dtype)
