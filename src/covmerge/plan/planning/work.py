"""The work on an output's tensors: operands, an operation, and the form of the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, prod

import torch

from covmerge.base.types import TensorHeader
from covmerge.files.tensors.describe import TensorInfo
from covmerge.files.tensors.views import MatrixLayout
from covmerge.maths.linalg.random import Stream
from covmerge.plan.planning.forms import Form, ModelTensor, Place
from covmerge.plan.planning.operations import Merge, Operand, Operation

# Items with at most this many elements are computed on one core each.
_NARROW_ELEMENTS = 4 * 2**20
# After a tensor pass, at most this many parts are merged at once, one on each core. In a tensor
# pass, experts are read at once while they have this many elements together.
_PARTS_AT_ONCE = 8
_AT_ONCE_ELEMENTS = 2**25
# With this many elements of all experts, a tensor pass over all needs less memory than their tensors.
TOGETHER_ELEMENTS = 2**25


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one tensor of the output."""

    stored: TensorHeader  # its header in the base
    output: TensorHeader  # its header in the output (the base's name and shape, the output dtype)
    # Its description in the model; its role is `head` if each expert keeps its own.
    info: TensorInfo
    operation: Operation  # the operation on it, and the `rule` that determined it
    rule: str
    # The tensors that are merged, by expert. Experts that take no part are missing.
    operands: Mapping[str, Operand]
    # The tensor that updates are differences from, and that the merged update is added to; for a
    # copy, the tensor that is copied. None: updates are given directly, and the base is not needed.
    base: Operand | None
    form: Form = field(default_factory=ModelTensor)  # the form of the result in the output
    # For each expert, the tensor's name in its statistics file; empty if the method needs no data.
    statistics: Mapping[str, str] = field(default_factory=dict[str, str])
    # How it contains `(d_out, d_in)` matrices, whether or not the method uses them; None: it
    # contains none, or none of a layer.
    matrices: MatrixLayout | None = None
    # The other parameters that the config ties to it; it is stored for them too.
    ties: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the tensor in the base and in the output."""
        return self.output.name

    @property
    def key(self) -> str:
        """A name that is unique in the output; a head may have the same name as another tensor."""
        return f"{self.form.part}/{self.name}" if self.form.part else self.name

    @property
    def merge(self) -> Merge | None:
        """The merge that is done or prepared; None: the tensor is copied or inspected."""
        return self.operation.merge

    @property
    def changed_by_experts(self) -> bool:
        return any(operand.tensor is not None for operand in self.operands.values())

    def written_bytes(self, rows: range | None) -> int:
        return sum(place.nbytes for place in self.form.places(self.output, rows))

    def stream(self, expert: str, first_element: int = 0) -> Stream:
        """Return the random numbers for an expert's update, from an element on."""
        return Stream(f"{self.name}\0{expert}", first_element)


def parts_at_once(elements: int) -> int:
    """Return how many parts of a tensor are merged at once after a tensor pass."""
    return 1 if elements <= _NARROW_ELEMENTS else _PARTS_AT_ONCE  # a narrow item has one core


def experts_at_once(elements: int, experts: int, *, held: bool) -> int:
    """Return how many experts a tensor pass reads at once; `held`: it keeps data of each of them."""
    if elements <= _NARROW_ELEMENTS:
        return 1
    if not held:
        return min(experts, _PARTS_AT_ONCE)
    return max(1, min(experts, _AT_ONCE_ELEMENTS // elements))


@dataclass(frozen=True)
class WorkItem:
    """The work on a range of rows of one tensor: they are read, computed and written together."""

    tensor: TensorPlan  # its plan
    rows: range | None  # range of the first axis; None: the whole tensor (scalars have no rows)
    read_bytes: int  # stored bytes of base and experts that are read
    write_bytes: int  # bytes of the result
    workspace: int  # bytes that the computation needs in addition to its inputs and its result
    flops: float  # number of floating-point operations
    eigen_flops: float = 0.0  # the part of these for eigenproblems and singular values
    statistics_bytes: int = 0  # bytes of the experts' statistics, which are read with the tensor
    # Number of rows that are merged at once, if rows do not depend on each other; None: all.
    at_once: int | None = None
    # Whether a method that needs the whole tensor reads it first, expert by expert; then rows are
    # read again, and merged `at_once`.
    tensor_pass: bool = False
    pass_bytes: int = 0  # bytes that this first reading takes, as far as they are known before
    # Whether it reads and writes only factors, so that no tensor has the size of its rows.
    thin: bool = False

    @property
    def memory(self) -> int:
        return self.held_bytes + self.statistics_bytes + self.workspace + self.write_bytes

    @property
    def device_memory(self) -> int:
        """Bytes held on another device than the CPU, where parts are merged together."""
        if self.rows is None or self.at_once is None or self.tensor_pass:
            return self.memory
        return self.memory + (ceil(len(self.rows) / self.at_once) - 1) * self.workspace

    @property
    def held_bytes(self) -> int:
        """Stored bytes that are held from their reading to the end of the computation."""
        return 0 if self.tensor_pass else self.read_bytes

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        span = (self.rows.start, self.rows.stop) if self.rows is not None else (0, 1)
        return self.tensor.key, span

    @property
    def places(self) -> tuple[Place, ...]:
        return self.tensor.form.places(self.tensor.output, self.rows)

    def is_narrow(self, device: torch.device) -> bool:
        """Return whether the item is computed on one core beside others, not alone on all cores.

        Small factorisations and sums over a few rows gain little from a second core. Factors are
        too thin to share a product among cores. The answer depends only on the shape, never on
        other work, because the number of threads decides how sums are rounded.
        """
        return device.type == "cpu" and (self.thin or prod(self.shape) <= _NARROW_ELEMENTS)

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.tensor.stored.shape
        return whole if self.rows is None else (len(self.rows), *whole[1:])

    @property
    def matrices(self) -> MatrixLayout | None:
        """How the item's rows contain whole matrices; None: they contain none, or only parts of some."""
        layout, rows = self.tensor.matrices, self.rows
        if layout is None or rows is None or layout.stacked:
            return layout
        return layout if len(rows) == self.tensor.stored.shape[0] else None

    def parts(self, rows: int) -> Iterator[WorkItem]:
        """Yield items for `rows` of the item's rows each, one after another."""
        assert self.rows is not None
        for start in range(0, len(self.rows), rows):
            yield replace(
                self, rows=self.rows[start : start + rows], tensor_pass=False, pass_bytes=0
            )

    def leading(self, share: float) -> WorkItem:
        """Return an item with the given share of its leading rows, at least one row."""
        if not self.rows:
            return self
        rows = self.rows[: max(1, int(share * len(self.rows)))]
        return replace(self, rows=rows, read_bytes=self.read_bytes * len(rows) // len(self.rows))

    @property
    def first_element(self) -> int:
        return 0 if self.rows is None else self.rows.start * prod(self.tensor.stored.shape[1:])
