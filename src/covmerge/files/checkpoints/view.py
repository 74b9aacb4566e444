"""A checkpoint shown in another way, often under other names; all else is as it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Kind, Quantisation, find_header
from covmerge.files.checkpoints.content import Content
from covmerge.files.stores.hub_cache import HubModel


class View(Kind):
    """A view of a checkpoint, under other names or, by its subclasses, in another way.

    Args:
        stored: the checkpoint.
        names: of the tensors that are shown, the name there by the name here; None: all, under their own.
        notes: what a user should know.
    """

    def __init__(
        self, stored: Checkpoint, names: Mapping[str, str] | None = None, *notes: str
    ) -> None:
        self._stored = stored
        self.source = stored.source
        self.config: Mapping[str, Any] | None = stored.config
        self.notes = (*stored.notes, *notes)
        self._names: Mapping[str, str] = {} if names is None else names
        self.headers: Mapping[str, TensorHeader] = stored.headers
        if names is not None:
            renamed = {name: replace(stored.headers[old], name=name) for name, old in names.items()}
            self.headers = MappingProxyType(renamed)
        quantised = stored.quantisation
        self.quantisation: Quantisation | None = quantised and replace(quantised, derived=True)
        self.untied = stored.untied
        self.is_held = stored.is_held
        here = {old: name for name, old in (names or {n: n for n in stored.headers}).items()}
        self.shared: Mapping[str, str] = {
            here[name]: here[first]
            for name, first in stored.shared.items()
            if name in here and first in here
        }
        self.order = stored.order

    @property
    def seen(self) -> Checkpoint:
        """The checkpoint that it is a view of."""
        return self._stored

    @property
    def folder(self) -> Path | None:
        return self._stored.folder

    @property
    def hub(self) -> HubModel | None:
        return self._stored.hub

    def readme(self) -> Path | None:
        return self._stored.readme()

    def companions(self) -> Path | None:
        return self._stored.companions()

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, self.source)
        return self._stored.read(self._names.get(name, name), rows)

    def materialize(self) -> None:
        self._stored.materialize()

    def identity(self) -> dict[str, Json]:
        return self._stored.identity()

    def contents(self) -> Sequence[Content]:
        return self._stored.contents()

    def close(self) -> None:
        self._stored.close()


class RealParts(View):
    """A view of a checkpoint in which complex tensors have one more axis: real and imaginary part.

    These are merged as any other numbers.

    Args:
        stored: the checkpoint.
    """

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        self.headers = MappingProxyType(
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
