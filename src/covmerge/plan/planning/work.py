"""The work on the tensors of an output: operands, an operation, and the form of the result."""

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

# Items of at most so many elements are computed on one core each.
_NARROW_ELEMENTS = 4 * 2**20
# In a tensor pass so many parts are merged at once, at most, a core each; and experts are looked over at
# once as long as they have so many elements together.
_PARTS_AT_ONCE = 8
_AT_ONCE_ELEMENTS = 2**25
# From so many of all experts on, a tensor pass over all of them costs less memory than their tensors.
TOGETHER_ELEMENTS = 2**25


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the output.

    Attributes:
        stored: its header as the base has it.
        output: its header in the output (the base's name and shape, the output dtype).
        info: what it is in its model; `head`, where each expert keeps its own.
        operation: what happens to it, and by which `rule`.
        operands: what is merged, by expert. Experts that take no part in this tensor are not in it.
        base: what updates are the difference to, and what the merged one is added to; of a copy, what
            is copied. None: the updates come as such, and nothing else is asked for.
        form: what it becomes in the output.
        statistics: per expert, the name that its statistics file has for this tensor; empty where
            the method needs no data.
        matrices: how it holds `(d_out, d_in)` matrices, whatever its method sees of them; None where
            it holds none, or they are no layer's.
        ties: the other parameters that the config ties to it, for which it stands too.
    """

    stored: TensorHeader
    output: TensorHeader
    info: TensorInfo
    operation: Operation
    rule: str
    operands: Mapping[str, Operand]
    base: Operand | None
    form: Form = field(default_factory=ModelTensor)
    statistics: Mapping[str, str] = field(default_factory=dict[str, str])
    matrices: MatrixLayout | None = None
    ties: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in the base and in the output."""
        return self.output.name

    @property
    def key(self) -> str:
        """What tells it from all other tensors of the output: a head may have the name of one of them."""
        return f"{self.form.part}/{self.name}" if self.form.part else self.name

    @property
    def merge(self) -> Merge | None:
        """The merge that is done, or counted for; None: it is copied or inspected."""
        return self.operation.merge

    @property
    def changed_by_experts(self) -> bool:
        """Whether some expert has it."""
        return any(operand.tensor is not None for operand in self.operands.values())

    def written_bytes(self, rows: range | None) -> int:
        """Bytes of what some rows of it become."""
        return sum(place.nbytes for place in self.form.places(self.output, rows))

    def stream(self, expert: str, first_element: int = 0) -> Stream:
        """Random numbers of one expert's update, from an element on."""
        return Stream(f"{self.name}\0{expert}", first_element)


def parts_at_once(elements: int) -> int:
    """How many parts of a tensor of so many elements are merged at once, after a tensor pass."""
    return 1 if elements <= _NARROW_ELEMENTS else _PARTS_AT_ONCE  # a narrow item has one core


def experts_at_once(elements: int, experts: int, *, held: bool) -> int:
    """How many experts' tensors of so many elements a tensor pass reads at once; `held`: some of each."""
    if elements <= _NARROW_ELEMENTS:
        return 1
    if not held:
        return min(experts, _PARTS_AT_ONCE)
    return max(1, min(experts, _AT_ONCE_ELEMENTS // elements))


@dataclass(frozen=True)
class WorkItem:
    """A row range of one tensor: read, computed and written as a whole.

    Attributes:
        tensor: its plan.
        rows: range of the first axis; None for the whole of a tensor (scalars have no rows).
        read_bytes: stored bytes of base and experts.
        write_bytes: bytes of the result.
        statistics_bytes: bytes of the experts' statistics, which are read with the tensor.
        at_once: rows that are merged at once, where what a row becomes does not depend on others;
            None: all of them.
        tensor_pass: whether a method that must know the whole reads it first, expert by expert; then rows
            are read again, and merged `at_once`.
        pass_bytes: bytes that this reads, as far as it is known before.
        workspace: bytes that computing it takes beside its inputs and its result.
        flops: floating-point operations.
        eigen_flops: of these, those of eigenproblems and singular values.
        thin: nothing of it is ever as large as its rows: factors in, factors out.
    """

    tensor: TensorPlan
    rows: range | None
    read_bytes: int
    write_bytes: int
    workspace: int
    flops: float
    eigen_flops: float = 0.0
    statistics_bytes: int = 0
    at_once: int | None = None
    tensor_pass: bool = False
    pass_bytes: int = 0
    thin: bool = False

    @property
    def memory(self) -> int:
        """Bytes alive while the item is computed."""
        return self.held_bytes + self.statistics_bytes + self.workspace + self.write_bytes

    @property
    def device_memory(self) -> int:
        """The same on a device that is not the CPU: what is merged in parts is merged whole there."""
        if self.rows is None or self.at_once is None or self.tensor_pass:
            return self.memory
        return self.memory + (ceil(len(self.rows) / self.at_once) - 1) * self.workspace

    @property
    def held_bytes(self) -> int:
        """Stored bytes that are alive from their reading to the end of the computation."""
        return 0 if self.tensor_pass else self.read_bytes

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        """Identity in the journal."""
        span = (self.rows.start, self.rows.stop) if self.rows is not None else (0, 1)
        return self.tensor.key, span

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its result lies in the output."""
        return self.tensor.form.places(self.tensor.output, self.rows)

    def is_narrow(self, device: torch.device) -> bool:
        """Whether it is computed on one core, beside others, rather than on all cores, alone.

        Small factorisations and sums over a few rows gain little from a second core, and on one each
        lose nothing; factors are too thin to share a product among cores. It follows from the shape,
        never from what else is going on: the number of threads decides how sums are rounded.
        """
        return device.type == "cpu" and (self.thin or self.is_small)

    @property
    def is_small(self) -> bool:
        """Whether its rows alone keep no large device busy."""
        return prod(self.shape) <= _NARROW_ELEMENTS

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its rows."""
        whole = self.tensor.stored.shape
        return whole if self.rows is None else (len(self.rows), *whole[1:])

    @property
    def matrices(self) -> MatrixLayout | None:
        """How its rows hold whole matrices; None where they hold none, or parts of them."""
        layout, rows = self.tensor.matrices, self.rows
        if layout is None or rows is None or layout.stacked:
            return layout
        return layout if len(rows) == self.tensor.stored.shape[0] else None

    def parts(self, rows: int) -> Iterator[WorkItem]:
        """Yield the work on so many of its rows after the other."""
        assert self.rows is not None
        for start in range(0, len(self.rows), rows):
            yield replace(
                self, rows=self.rows[start : start + rows], tensor_pass=False, pass_bytes=0
            )

    def leading(self, share: float) -> WorkItem:
        """Return the first of its rows, one at least."""
        if not self.rows:
            return self
        rows = self.rows[: max(1, int(share * len(self.rows)))]
        return replace(self, rows=rows, read_bytes=self.read_bytes * len(rows) // len(self.rows))

    @property
    def first_element(self) -> int:
        """Place of the item's first element in its tensor."""
        return 0 if self.rows is None else self.rows.start * prod(self.tensor.stored.shape[1:])
