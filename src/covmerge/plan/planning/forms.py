"""How the result of a piece of work is encoded, and where it lies in the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.base.types import Json, LowRank, TensorHeader
from covmerge.files.checkpoints.adapter_layout import AdaptedTensor, WholeTensor
from covmerge.files.checkpoints.layout import HEADS_FOLDER
from covmerge.files.checkpoints.masks import MASKS_FOLDER, packed_header
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.linalg.bits import pack
from covmerge.maths.linalg.stored import stored_as

MODEL = ""  # the part of an output that its weights are
STEM = "model"  # of the names of a module's files


@dataclass(frozen=True)
class Place:
    """Rows of a stored tensor.

    Attributes:
        part: the files that it lies in: `MODEL`, or the name of one file beside the weights, without
            its suffix.
        header: of the stored tensor.
        rows: None for the whole.
    """

    part: str
    header: TensorHeader
    rows: range | None = None

    @property
    def tensor(self) -> str:
        """Its name there."""
        return self.header.name

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self.header.nbytes if self.rows is None else self.header.nbytes_of(self.rows)


@dataclass(frozen=True)
class Result:
    """What an item gave.

    Attributes:
        tensors: on the CPU, one for each of the item's places.
        stats: sizes and squared norms, which add up over the items of a tensor, and the method's
            diagnostics, a matrix.
    """

    tensors: tuple[Tensor, ...] = ()
    stats: Mapping[str, Json] = field(default_factory=dict[str, Json])


class MergedRows(Protocol):
    """Merged rows, which a form asks for in the way that it stores them.

    Attributes:
        facts: what was measured of them, which each of the methods adds to.
    """

    facts: dict[str, Json]

    def update(self) -> Tensor:
        """Return ΔW in the dtype of the computation."""
        ...

    def exact(self) -> Tensor:
        """Return W_0 + ΔW in the dtype of the computation."""
        ...

    def rounded(self) -> Tensor:
        """Return W_0 + ΔW in the dtype of the output."""
        ...

    def factors(self, rank: int) -> tuple[LowRank, Tensor]:
        """Return ΔW ≈ BA of a rank in the stored orientation, and all singular values."""
        ...

    def mask(self, expert: str) -> Tensor:
        """Return the entries that are an expert's."""
        ...

    def failure(self, why: str) -> TensorError:
        """Return the error of a result that is nothing to store."""
        ...


class Form:
    """An encoding. What is said here holds unless a form says something else.

    Attributes:
        part: the part of the output that its weights are in; `MODEL` stands for the files of the tensor's
            own module as well.
        masks: the experts that have a mask of it.
        format: the quantised format that it is packed in; "": it is plain.
        holds_weights: whether it is W_0 + ΔW, and needs the base's rows.
        in_parts: whether rows can be merged one after the other, and encoded at the end.
    """

    part: str = MODEL
    masks: tuple[str, ...] = ()
    format: str = ""
    holds_weights: bool = True
    in_parts: bool = True

    @property
    def rows_together(self) -> int | None:
        """Rows that are written together; None: all of them."""
        return 1

    @property
    def adapted(self) -> AdaptedTensor | None:
        """What an adapter updates of it."""
        return None

    @property
    def whole(self) -> WholeTensor | None:
        """What an adapter holds whole of it."""
        return None

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        """Return where some rows of a tensor lie."""
        raise NotImplementedError

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        """Return merged rows in this form.

        Raises:
            TensorError: they are not finite, or do not fit the dtype that they are stored in.
        """
        raise NotImplementedError

    def copied(
        self, base: Tensor, stored: tuple[Tensor, ...], output: TensorHeader, rows: range | None
    ) -> Result:
        """Return rows of the base in this form.

        Args:
            base: the rows.
            stored: what the base stores of them, if `read_stored` gave anything.
            output: the tensor in the output.
            rows: which rows they are.

        Raises:
            TensorError: as `encode`.
        """
        raise NotImplementedError

    def completed(
        self,
        result: Result,
        base: Tensor | None,
        stored: tuple[Tensor, ...],
        output: TensorHeader,
        rows: range | None,
    ) -> Result:
        """Return what all rows of an item become, after each part of them was encoded."""
        del base, stored, output, rows
        return result

    def read_stored(
        self, read: Callable[[str, range | None], Tensor], rows: range | None
    ) -> tuple[Tensor, ...]:
        """Return what the base stores of some rows, where it stores them in the same way."""
        del read, rows
        return ()

    def read_back(self, exact: Tensor, dtype: torch.dtype, rows: range | None) -> Tensor:
        """Return what a reader of the output makes of exact rows, in the dtype that it reads."""
        del rows
        return exact.to(dtype)

    def cost(self, d_out: int, d_in: int, itemsize: int) -> Cost:
        """Return the work of encoding one matrix."""
        del d_out, d_in, itemsize
        return Cost(0.0, 0)

    def workspace(self, elements: int, itemsize: int) -> int:
        """Return bytes that encoding so many elements takes beside their merge."""
        del elements, itemsize
        return 0


@dataclass(frozen=True)
class ModelTensor(Form):
    """The weights W_0 + ΔW in the output dtype, and beside them mask bits.

    Attributes:
        part: see `Form`.
        masks: the experts that have a mask of it, an empty one where they have no part in it.
    """

    part: str = MODEL
    masks: tuple[str, ...] = ()

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        stored = output.as_stored
        own = Place(self.part or module_part(output), stored, rows if stored.shape else None)
        mask = packed_header(output)
        return (own, *(Place(mask_part(expert), mask, rows) for expert in self.masks))

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        weights = rows.rounded()
        masks = (pack(rows.mask(expert).cpu()) for expert in self.masks)
        return Result((weights, *masks), rows.facts)

    def copied(
        self, base: Tensor, stored: tuple[Tensor, ...], output: TensorHeader, rows: range | None
    ) -> Result:
        return Result((as_output(output, base, "base's weights"),))


@dataclass(frozen=True)
class AdapterTensor(Form):
    """The weights W_0 + ΔW, under each of the names by which an adapter holds them whole."""

    place: WholeTensor
    in_parts = False

    @property
    def whole(self) -> WholeTensor:
        return self.place

    @property
    def rows_together(self) -> int | None:
        return None

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        stored = output.as_stored
        own = rows if stored.shape else None
        return tuple(Place(MODEL, replace(stored, name=key), own) for key in self.place.keys)

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        return self._under_names(rows.rounded(), rows.facts)

    def copied(
        self, base: Tensor, stored: tuple[Tensor, ...], output: TensorHeader, rows: range | None
    ) -> Result:
        unchanged: dict[str, Json] = {"updates": {}, "along": {}, "base": 0.0}
        unchanged |= {"merged": 0.0, "rounding": 0.0}
        return self._under_names(as_output(output, base, "base's weights"), unchanged)

    def _under_names(self, weights: Tensor, facts: Mapping[str, Json]) -> Result:
        first, *ties = self.place.names
        adapter: dict[str, Json] = {"tensor": first, "ties": [*ties]}
        return Result(tuple(weights for _ in self.place.keys), {**facts, "adapter": adapter})


@dataclass(frozen=True)
class Unwritten(Form):
    """Statistics only; no tensor is written."""

    holds_weights = False
    in_parts = False

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        return ()

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        rows.update()
        return Result((), {**rows.facts, "rounding": 0.0, "left_out": True})

    def copied(
        self, base: Tensor, stored: tuple[Tensor, ...], output: TensorHeader, rows: range | None
    ) -> Result:
        return Result()


def as_output(output: TensorHeader, rows: Tensor, what: str) -> Tensor:
    """Round to the dtype of the output.

    Raises:
        TensorError: `what` these rows are does not fit it.
    """
    try:
        return stored_as(rows, output.dtype)
    except OverflowError as error:
        raise TensorError(
            f"'{output.name}': the {what} overflow {output.dtype} ({error}); store them in "
            "another dtype (--out-dtype float32)"
        ) from error


def module_part(output: TensorHeader) -> str:
    """Return the part that a tensor of the model is in: its own files, or those of a module."""
    return MODEL if output.module is None else f"{output.module.folder}/{STEM}"


def mask_part(expert: str) -> str:
    """Return the part that the masks of an expert are in."""
    return f"{MASKS_FOLDER}/{expert}"


def head_part(expert: str) -> str:
    """Return the part that the task head of an expert is in."""
    return f"{HEADS_FOLDER}/{expert}"
