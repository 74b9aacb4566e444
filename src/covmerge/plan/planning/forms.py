"""Forms of results: how a work item's result is encoded, and its place in the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.base.settings import Hint
from covmerge.base.text import keep_plain
from covmerge.base.types import Json, LowRank, TensorHeader
from covmerge.files.adapters.layout import AdaptedTensor, WholeTensor
from covmerge.files.checkpoints.layout import HEADS_FOLDER, MASKS_FOLDER, packed_header
from covmerge.files.quantised.writing.packing import Blocks, Packing
from covmerge.maths.linalg.auto import Cost, svd_cost
from covmerge.maths.linalg.lapack import dot, square_norm
from covmerge.maths.linalg.masks import pack
from covmerge.maths.linalg.stored import stored_as

MODEL = ""  # the part of an output that has its weights
STEM = "model"  # beginning of the names of a module's files

# Number of singular values reported for each layer, enough to choose a rank by.
_SPECTRUM = 256
# Memory for rounding and reading back a piece of a packed tensor, and for each number of it.
_PACKING = 64 * 2**20
_OF_A_NUMBER = 32


@dataclass(frozen=True)
class Place:
    """The place of some rows of a stored tensor, or of all of them (None).

    Attributes:
        part: the part of the output, and so the files: `MODEL`, or the name of a file beside the
            weights, without its suffix.
    """

    part: str
    header: TensorHeader
    rows: range | None = None

    @property
    def tensor(self) -> str:
        return self.header.name

    @property
    def nbytes(self) -> int:
        return self.header.nbytes if self.rows is None else self.header.nbytes_of(self.rows)


@dataclass(frozen=True)
class Result:
    """The result of a work item."""

    tensors: tuple[Tensor, ...] = ()  # one tensor on the CPU for each of the item's places
    # Sizes and squared norms, which add up over the items of a tensor, and the method's diagnostics
    # for each matrix.
    stats: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True)
class BaseRows:
    """Rows of the base that an item copies, or merges updates into."""

    rows: Tensor  # the rows; a tensor on the meta device, without content, if they were not read
    stored: tuple[Tensor, ...]  # the base's stored tensors for these rows, if the form uses them
    output: TensorHeader
    place: range | None  # which rows of the tensor these are


class MergedRows(Protocol):
    """Merged rows, which a form requests in the way in which it stores them.

    Attributes:
        facts: measurements of the rows; each of the methods adds some.
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
        """Return ΔW ≈ BA of the given rank in the stored orientation, and all singular values."""
        ...

    def mask(self, expert: str) -> Tensor:
        """Return the mask of an expert: which entries belong to it."""
        ...

    def failure(self, why: str) -> TensorError:
        """Return an error for a result that cannot be stored."""
        ...


class Form:
    """An encoding of results; its subclasses override some of these defaults.

    Attributes:
        part: the part of the output that has the weights; `MODEL` also stands for the files of a
            tensor's own module.
        masks: the experts that have a mask of the tensor.
        format: the quantised format that the tensor is packed in; "": it is plain.
        holds_weights: whether the result is W_0 + ΔW, and so needs the base's rows.
        in_parts: whether parts of the rows can be merged one after another, and encoded at the end.
    """

    part: str = MODEL
    masks: tuple[str, ...] = ()
    format: str = ""
    holds_weights: bool = True
    in_parts: bool = True

    @property
    def rows_together(self) -> int | None:
        """Number of rows that must be written together; None: all rows."""
        return 1

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of weights with one scale; None: none, or they cannot be checked alone."""
        return None

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        raise NotImplementedError

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        """Return merged rows in this form.

        Raises:
            TensorError: the rows are not finite, or exceed the range of the stored dtype.
        """
        raise NotImplementedError

    def copied(self, base: BaseRows) -> Result:
        """Return rows of the base in this form."""
        raise NotImplementedError

    def completed(self, result: Result, base: BaseRows) -> Result:
        """Return the final result of an item, after all parts of its rows were encoded."""
        return result

    def read_stored(
        self, read: Callable[[str, range | None], Tensor], rows: range | None
    ) -> tuple[Tensor, ...]:
        """Return the base's stored tensors for some rows, if the base stores the tensor in this form."""
        return ()

    def read_back(
        self, exact: Tensor, dtype: torch.dtype, rows: range | None, *, changed: bool
    ) -> Tensor:
        """Return the values that a reader of the output gets for exact rows, in the reader's dtype.

        `changed` tells whether the rows have an update.
        """
        return exact.to(dtype)

    def cost(self, d_out: int, d_in: int, itemsize: int) -> Cost:
        return Cost(0.0, 0)

    def workspace(self, elements: int, itemsize: int) -> int:
        """Return the bytes needed to encode this many elements, in addition to merging them."""
        return 0


@dataclass(frozen=True)
class ModelTensor(Form):
    """The weights W_0 + ΔW in the output dtype, with a mask for each of `masks`.

    The mask of an expert that takes no part in the tensor is empty.
    """

    part: str = MODEL
    masks: tuple[str, ...] = ()

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        stored = output.as_stored
        place = Place(self.part or module_part(output), stored, rows if stored.shape else None)
        mask = packed_header(output)
        return (place, *(Place(mask_part(expert), mask, rows) for expert in self.masks))

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        weights = rows.rounded()
        masks = (pack(rows.mask(expert).cpu()) for expert in self.masks)
        return Result((weights, *masks), rows.facts)

    def copied(self, base: BaseRows) -> Result:
        return Result((as_output(base.output, base.rows, "base's weights"),))


@dataclass(frozen=True)
class AdapterTensor(Form):
    """The weights W_0 + ΔW, stored under each of the names by which an adapter holds the tensor whole."""

    place: WholeTensor
    in_parts = False

    @property
    def rows_together(self) -> int | None:
        return None

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        stored = output.as_stored
        row_range = rows if stored.shape else None
        return tuple(Place(MODEL, replace(stored, name=key), row_range) for key in self.place.keys)

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        return self._under_names(rows.rounded(), rows.facts)

    def copied(self, base: BaseRows) -> Result:
        nothing = dict.fromkeys(("base", "merged", "rounding"), 0.0)
        unchanged: dict[str, Json] = {"updates": {}, "along": {}, **nothing}
        return self._under_names(as_output(base.output, base.rows, "base's weights"), unchanged)

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

    def copied(self, base: BaseRows) -> Result:
        return Result()


@dataclass(frozen=True)
class PackedTensor(Form):
    """The weights W_0 + ΔW rounded to a quantised format, in the stored tensors of that format."""

    packing: Packing
    # Whether the base stores the tensor in the same way, so that unchanged rows are copied from it.
    as_base: bool
    format: str = field()  # name of the format, for readers

    @property
    def rows_together(self) -> int | None:
        return self.packing.step

    @property
    def blocks(self) -> Blocks | None:
        return self.packing.blocks

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        return tuple(Place(MODEL, part.header, block) for part, block in self.packing.held(rows))

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        """Return the exact rows, which `completed` packs together."""
        exact = rows.exact().cpu()
        return Result((exact,), {**rows.facts, "rounding": 0.0})

    def completed(self, result: Result, base: BaseRows) -> Result:
        """Pack merged rows, which are rounded once, from the dtype of the computation.

        Rows that equal the base's bit for bit become the base's stored rows, if the base has the
        same layout.
        """
        (exact,) = result.tensors
        known = None if base.rows.is_meta else base.rows
        stored = base.stored if self.as_base else ()
        if stored and known is not None and torch.equal(exact, known.to(exact.dtype)):
            return Result(stored, {**result.stats, "packed": _sums(square_norm(exact), 0.0, 0.0)})
        parts, sums = self._rounded(exact, known, base.output, base.place)
        return Result(parts, {**result.stats, "rounding": sums["error"], "packed": sums})

    def copied(self, base: BaseRows) -> Result:
        if self.as_base and base.stored:
            return Result(base.stored)
        parts, sums = self._rounded(base.rows, None, base.output, base.place)
        return Result(parts, {"packed": sums})

    def read_stored(
        self, read: Callable[[str, range | None], Tensor], rows: range | None
    ) -> tuple[Tensor, ...]:
        if not self.as_base:
            return ()
        held = self.packing.held(rows)
        return self.packing.taken([read(part.header.name, block) for part, block in held], rows)

    def read_back(
        self, exact: Tensor, dtype: torch.dtype, rows: range | None, *, changed: bool
    ) -> Tensor:
        if self.as_base and not changed:
            return exact.to(dtype)
        assert rows is not None, "scalars are not packed"
        parts = self.packing.quantise(exact.float())
        return torch.cat([read for _, read in self.packing.unpacked(parts, rows)]).to(dtype)

    def workspace(self, elements: int, itemsize: int) -> int:
        """Return the bytes of the exact rows, of their copy in float32, and of a piece being packed."""
        single = torch.float32.itemsize
        exact = itemsize + (single if itemsize > single else 0)
        return elements * exact + min(_PACKING, elements * _OF_A_NUMBER)

    def _rounded(
        self, exact: Tensor, base: Tensor | None, output: TensorHeader, rows: range | None
    ) -> tuple[tuple[Tensor, ...], dict[str, Json]]:
        """Return packed parts of rows, and sums of the rounding error that a client of the output sees."""
        assert rows is not None, "scalars are not packed"
        try:
            parts = self.packing.quantise(exact.float())
        except OverflowError as problem:
            raise self._not_held(output) from problem
        weights, error, along = 0.0, 0.0, None if base is None else 0.0
        for few, read in self.packing.unpacked(parts, rows):
            place = slice(few.start - rows.start, few.stop - rows.start)
            wanted = exact[place]
            lost = read.to(wanted.dtype).sub_(wanted)
            weights += square_norm(wanted)
            error += square_norm(lost)
            if base is not None and along is not None:
                update = wanted - base[place].to(wanted.dtype)
                along += dot(lost.add_(update), update)
        if not isfinite(error):
            raise self._not_held(output)
        return self.packing.placed(parts, rows), _sums(weights, error, along)

    def _not_held(self, output: TensorHeader) -> TensorError:
        return TensorError(
            f"'{output.name}': the merged weights are not finite, or beyond what {self.format} can "
            f"hold: {keep_plain([output.name])}"
        )


@dataclass(frozen=True)
class AdapterFactors(Form):
    """The update ΔW ≈ BA as factors, in the format that PEFT reads."""

    place: AdaptedTensor  # the layer of the adapter
    dtype: torch.dtype  # of the stored factors
    holds_weights = False
    in_parts = False

    @property
    def rows_together(self) -> int | None:
        return None

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        """Return the places of the factors, which are written whole."""
        return tuple(Place(MODEL, header) for header in self.place.headers(self.dtype))

    def cost(self, d_out: int, d_in: int, itemsize: int) -> Cost:
        return svd_cost(d_out, d_in, self.place.rank, itemsize)

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        rank = self.place.rank
        update, sigma = rows.factors(rank)
        factors = replace(output, dtype=self.dtype)
        what = "factors of the merged update"
        rounded = LowRank(
            as_output(factors, update.left, what), as_output(factors, update.right, what)
        )
        energy = sigma.double().square()
        total, retained = float(energy.sum()), float(energy[:rank].sum())
        lost = _rounding(update, rounded)
        if not isfinite(total + lost):
            raise rows.failure("gave NaN or Inf from finite updates")
        adapter: dict[str, Json] = {
            "tensor": self.place.name,
            "rank": rank,
            "discarded_energy": 1.0 - retained / total if total else 0.0,
            "singular_values": [float(value) for value in sigma[:_SPECTRUM]],
        }
        facts: dict[str, Json] = {"merged": total, "rounding": lost, "adapter": adapter}
        pieces = self.place.factors(rounded.to(torch.device("cpu")))
        return Result(tuple(pieces), {**rows.facts, **facts})


def as_output(output: TensorHeader, rows: Tensor, what: str) -> Tensor:
    """Round a tensor to the dtype of the output, and raise if it overflows."""
    try:
        return stored_as(rows, output.dtype)
    except OverflowError as error:
        raise TensorError(
            f"'{output.name}': the {what} overflow {output.dtype} ({error}); store them in "
            f"another dtype ({Hint('out_dtype', 'float32')})"
        ) from error


def module_part(output: TensorHeader) -> str:
    """Return the part of the output for a tensor of the model: the model's own files or a module's."""
    return MODEL if output.module is None else f"{output.module.folder}/{STEM}"


def mask_part(expert: str) -> str:
    """Return the part of the output for an expert's masks."""
    return f"{MASKS_FOLDER}/{expert}"


def head_part(expert: str) -> str:
    """Return the part of the output for an expert's task head."""
    return f"{HEADS_FOLDER}/{expert}"


def _rounding(exact: LowRank, rounded: LowRank) -> float:
    """Return ‖LR − L̃R̃‖²_F ≈ Σ_j σ_j (‖L_j − L̃_j‖² + ‖R_j − R̃_j‖²), where LᵀL = RRᵀ = diag(σ).

    The sum omits products of independent errors. A Gram matrix of all errors would be exact, but
    would cost a third of the work on a layer.
    """
    if rounded.left.dtype == exact.left.dtype:
        return 0.0
    # In float64, because squares of long factors can overflow float32 although the stored values do
    # not.
    exact, back = exact.to(torch.float64), rounded.to(torch.float64)
    sigma = exact.right.square().sum(dim=1)
    left = (exact.left - back.left).square().sum(dim=0)
    right = (exact.right - back.right).square().sum(dim=1)
    return float((sigma * (left + right)).sum())


def _sums(weights: float, error: float, along: float | None) -> dict[str, Json]:
    """Return what an item's statistics say about its rounding.

    These are ‖W̄‖², ‖Q(W̄) − W̄‖², and for an update ⟨Q(W̄) − W_0, W̄ − W_0⟩.
    """
    found: dict[str, Json] = {"weights": weights, "error": error}
    return found if along is None else {**found, "along": along}
