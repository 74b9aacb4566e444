"""How the result of a piece of work is encoded, and where it lies in the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.adapter_layout import AdaptedTensor, WholeTensor
from covmerge.files.checkpoints.layout import HEADS_FOLDER
from covmerge.files.checkpoints.masks import MASKS_FOLDER, packed_header
from covmerge.files.quantised import Packing

MODEL = ""  # the part of an output that its weights are
STEM = "model"  # of the names of a module's files


@dataclass(frozen=True)
class Place:
    """Rows of a stored tensor.

    Attributes:
        part: the files that it lies in: `MODEL`, or the name of one file beside the weights, without
            its suffix.
        tensor: its name there.
        rows: None for the whole.
    """

    part: str
    tensor: str
    rows: range | None = None


class Form(Protocol):
    """An encoding."""

    def headers(self, output: TensorHeader) -> Mapping[str, tuple[TensorHeader, ...]]:
        """Return what a tensor is stored as, by part."""
        ...

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        """Return where some rows of it lie."""
        ...


@dataclass(frozen=True)
class ModelTensor:
    """The weights W_0 + ΔW in the output dtype, and beside them mask bits.

    Attributes:
        part: where the weights lie; `MODEL` stands for the files of the tensor's own module as well.
        masks: the experts that have a mask of it, an empty one where they have no part in it.
    """

    part: str = MODEL
    masks: tuple[str, ...] = ()

    def headers(self, output: TensorHeader) -> Mapping[str, tuple[TensorHeader, ...]]:
        packed = packed_header(output)
        part = self.part or module_part(output)
        return {part: (output.as_stored,), **{mask_part(e): (packed,) for e in self.masks}}

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        beside = (Place(mask_part(expert), output.name, rows) for expert in self.masks)
        stored = output.as_stored
        own = rows if stored.shape else None
        return (Place(self.part or module_part(output), stored.name, own), *beside)


@dataclass(frozen=True)
class PackedTensor:
    """The weights W_0 + ΔW rounded to a quantised format, in the tensors that it is stored as.

    Attributes:
        packing: how.
        as_base: whether the base stores it in the same way, so that rows that nothing changed are its own.
        format: its name, for who reads of it.
    """

    packing: Packing
    as_base: bool
    format: str

    def headers(self, output: TensorHeader) -> Mapping[str, tuple[TensorHeader, ...]]:
        del output
        return {MODEL: tuple(part.header for part in self.packing.parts)}

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        del output
        held = filter(None, self.packing.held(rows))
        return tuple(Place(MODEL, part.header.name, own) for part, own in held)


@dataclass(frozen=True)
class AdapterFactors:
    """The update ΔW ≈ BA by its factors, as PEFT reads them.

    Attributes:
        place: what the adapter has of the tensor.
        dtype: of the stored factors.
    """

    place: AdaptedTensor
    dtype: torch.dtype

    def headers(self, output: TensorHeader) -> Mapping[str, tuple[TensorHeader, ...]]:
        del output
        return {MODEL: self.place.headers(self.dtype)}

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        """See `Form.places`; factors are written whole."""
        del output, rows
        return tuple(Place(MODEL, key) for key in self.place.keys)


@dataclass(frozen=True)
class AdapterTensor:
    """The weights W_0 + ΔW, under each of the names by which an adapter holds them whole."""

    place: WholeTensor

    def headers(self, output: TensorHeader) -> Mapping[str, tuple[TensorHeader, ...]]:
        return {MODEL: tuple(replace(output.as_stored, name=key) for key in self.place.keys)}

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        own = rows if output.as_stored.shape else None
        return tuple(Place(MODEL, key, own) for key in self.place.keys)


@dataclass(frozen=True)
class Unwritten:
    """Nothing but what there is to say of it."""

    def headers(self, output: TensorHeader) -> Mapping[str, tuple[TensorHeader, ...]]:
        del output
        return {}

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        del output, rows
        return ()


def module_part(output: TensorHeader) -> str:
    """Return the part that a tensor of the model is in: its own files, or those of a module."""
    return MODEL if output.module is None else f"{output.module.folder}/{STEM}"


def mask_part(expert: str) -> str:
    """Return the part that the masks of an expert are in."""
    return f"{MASKS_FOLDER}/{expert}"


def head_part(expert: str) -> str:
    """Return the part that the task head of an expert is in."""
    return f"{HEADS_FOLDER}/{expert}"
