"""Merged rows as a quantised format stores them, and what rounding does to their update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.base.text import keep_plain
from covmerge.base.types import Json, TensorHeader
from covmerge.files.quantised import Packing
from covmerge.maths.linalg.lapack import dot, square_norm
from covmerge.plan.planning.forms import MODEL, Form, MergedRows, Place, Result

# What rounding and reading back a piece of a packed tensor takes, and a number of it.
_PACKING = 64 * 2**20
_OF_A_NUMBER = 32


@dataclass(frozen=True)
class PackedTensor(Form):
    """The weights W_0 + ΔW rounded to a quantised format, in the tensors that it is stored as.

    Attributes:
        packing: how.
        as_base: whether the base stores it in the same way, so that rows that nothing changed are its own.
        format: its name, for who reads of it.
    """

    packing: Packing
    as_base: bool
    format: str = field()

    @property
    def rows_together(self) -> int | None:
        return self.packing.step

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        held = filter(None, self.packing.held(rows))
        return tuple(Place(MODEL, part.header, own) for part, own in held)

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        """See `Form.encode`; the exact rows, which `completed` packs together."""
        exact = rows.exact().cpu()
        return Result((exact,), {**rows.facts, "rounding": 0.0})

    def completed(
        self,
        result: Result,
        base: Tensor | None,
        stored: tuple[Tensor, ...],
        output: TensorHeader,
        rows: range | None,
    ) -> Result:
        """Pack merged rows, rounded once, from the dtype of the computation.

        Rows that are the base's, to the bit, become what it stores of them, where that is the same layout.

        Raises:
            TensorError: weights that are not finite, or that the format cannot hold.
        """
        (exact,) = result.tensors
        if (
            self.as_base
            and stored
            and base is not None
            and torch.equal(exact, base.to(exact.dtype))
        ):
            return Result(stored, {**result.stats, "packed": _sums(square_norm(exact), 0.0, 0.0)})
        parts, sums = self._rounded(exact, base, output, rows)
        return Result(parts, {**result.stats, "rounding": sums["error"], "packed": sums})

    def copied(
        self, base: Tensor, stored: tuple[Tensor, ...], output: TensorHeader, rows: range | None
    ) -> Result:
        if self.as_base and stored:
            return Result(stored)
        parts, sums = self._rounded(base, None, output, rows)
        return Result(parts, {"packed": sums})

    def read_stored(
        self, read: Callable[[str, range | None], Tensor], rows: range | None
    ) -> tuple[Tensor, ...]:
        if not self.as_base:
            return ()
        held = filter(None, self.packing.held(rows))
        return self.packing.taken([read(part.header.name, own) for part, own in held], rows)

    def read_back(self, exact: Tensor, dtype: torch.dtype, rows: range | None) -> Tensor:
        assert rows is not None, "scalars are not packed"
        parts = self.packing.quantise(exact.float())
        return torch.cat([read for _, read in self.packing.unpacked(parts, rows)]).to(dtype)

    def workspace(self, elements: int, itemsize: int) -> int:
        """See `Form.workspace`; the exact rows, in float32 too, and a piece of them."""
        single = torch.float32.itemsize
        exact = itemsize + (single if itemsize > single else 0)
        return elements * exact + min(_PACKING, elements * _OF_A_NUMBER)

    def _rounded(
        self, exact: Tensor, base: Tensor | None, output: TensorHeader, rows: range | None
    ) -> tuple[tuple[Tensor, ...], dict[str, Json]]:
        """Parts of some rows, and how far what a client reads is from the rows; sums, which add up."""
        assert rows is not None, "scalars are not packed"
        try:
            parts = self.packing.quantise(exact.float())
        except OverflowError as problem:
            raise self._not_held(output) from problem
        weights, error, along = 0.0, 0.0, None if base is None else 0.0
        for few, read in self.packing.unpacked(parts, rows):
            own = slice(few.start - rows.start, few.stop - rows.start)
            wanted = exact[own]
            lost = read.to(wanted.dtype).sub_(wanted)
            weights += square_norm(wanted)
            error += square_norm(lost)
            if base is not None and along is not None:
                update = wanted - base[own].to(wanted.dtype)
                along += dot(lost.add_(update), update)
        if not isfinite(error):
            raise self._not_held(output)
        return self.packing.placed(parts, rows), _sums(weights, error, along)

    def _not_held(self, output: TensorHeader) -> TensorError:
        return TensorError(
            f"'{output.name}': the merged weights are not finite, or beyond what {self.format} can "
            f"hold: {keep_plain([output.name])}"
        )


def _sums(weights: float, error: float, along: float | None) -> dict[str, Json]:
    """What the statistics of an item have of its rounding.

    ‖W̄‖², ‖Q(W̄) − W̄‖², and of an update ⟨Q(W̄) − W_0, W̄ − W_0⟩.
    """
    found: dict[str, Json] = {"weights": weights, "error": error}
    return found if along is None else {**found, "along": along}
