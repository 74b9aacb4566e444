"""The cost of a work item: bytes read and written, memory, and floating-point operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from covmerge.files.tensors.views import matrix_shapes
from covmerge.maths.linalg.auto import Cost, svd_cost
from covmerge.plan.planning.data import Statistics
from covmerge.plan.planning.models import Model
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.work import TensorPlan, WorkItem, experts_at_once, parts_at_once


@dataclass(frozen=True)
class Costs:
    """A calculator that makes work items with their costs."""

    models: Mapping[str, Model]
    statistics: Statistics
    itemsize: int  # bytes of a number in the dtype of the computation
    alone: bool  # whether no other plan shares the reading

    def summed(self, tensor: TensorPlan) -> bool:
        """Return whether adapters are summed by their factors, without multiplying out single updates."""
        merge = tensor.merge
        if merge is None or not merge.procedure.is_linear_for(merge.parameters):
            return False
        found = [
            self.models[expert].checkpoint.low_rank.get(operand.tensor)
            for expert, operand in tensor.operands.items()
            if operand.tensor is not None
        ]
        # A stack has factors of each matrix, other updates have one pair. They are not summed together.
        kinds = {None if factors is None else factors.stacked for factors in found}
        return len(kinds) == 1 and None not in kinds

    def of_copy(self, tensor: TensorPlan, rows: range | None) -> WorkItem:
        numel = prod(shape_of(tensor, rows))
        compared = tensor.operation.compared
        read = _base_bytes(tensor, numel)
        read += sum(self._expert_bytes(tensor, numel).values()) if compared else 0
        space = tensor.form.workspace(numel, self.itemsize)
        write = tensor.written_bytes(rows)
        return WorkItem(tensor, rows, read, write, workspace=space, flops=0.0)

    def of_factors(self, tensor: TensorPlan, rows: range | None) -> WorkItem:
        """Return the work on factors: orthonormal bases, the method on the cores, and new factors."""
        assert tensor.merge is not None
        numel = prod(shape_of(tensor, rows))
        operands = [(e, o.tensor) for e, o in tensor.operands.items() if o.tensor is not None]
        held = (self.models[expert].checkpoint.low_rank[name].rank for expert, name in operands)
        rank = sum(held) + 1
        d_out, d_in = tensor.stored.shape[0], prod(tensor.stored.shape[1:])
        method, given = tensor.merge.procedure, tensor.merge.parameters
        sides = method.sides_for(given)
        core = (d_out if sides == "inputs" else rank, d_in if sides == "outputs" else rank)
        cost = method.cost_for(given)(*core, len(tensor.operands), 8)
        # Factors, their bases and the merged factors; a QR of r columns takes 2dr² operations.
        factors = (d_out + d_in) * rank
        made = 4 * factors * self.itemsize + cost.workspace
        return WorkItem(
            tensor,
            rows,
            read_bytes=_base_bytes(tensor, numel) + sum(self._expert_bytes(tensor, numel).values()),
            write_bytes=tensor.written_bytes(rows),
            workspace=made + svd_cost(*core, rank, 8).workspace,
            flops=6.0 * factors * rank + cost.flops,
            eigen_flops=cost.eigen,
            thin=True,
        )

    def of_merge(
        self, tensor: TensorPlan, rows: range | None, at_once: int | None, *, tensor_pass: bool
    ) -> WorkItem:
        """Return the work of merging rows, `at_once` rows together; None: all rows."""
        merge, shape = tensor.merge, shape_of(tensor, rows)
        assert merge is not None
        numel = prod(shape)
        base, experts = _base_bytes(tensor, numel), self._expert_bytes(tensor, numel)
        read = base + sum(experts.values())
        part = shape if at_once is None else (min(at_once, shape[0]), *shape[1:])
        costs = self._of_matrices(tensor, merge, shape, part)
        # If the loss of half-precision steps is measured, there is a second result.
        twice = merge.half is not None and not tensor_pass
        # Fisher information is read for the same rows, a Gram matrix whole. Each is cast once.
        data = merge.procedure.data
        measured = sum(
            numel if data == "fisher" else self.statistics[expert].header(data, name).numel
            for expert, name in tensor.statistics.items()
        )
        workspace = self._held(tensor, merge, prod(part), twice=twice)
        workspace += measured * self.itemsize + max(cost.workspace for cost in costs)
        if tensor_pass:
            merging = parts_at_once(numel) * (workspace + read * prod(part) // numel)
            workspace = _of_tensor_pass(tensor, merge, numel, merging)
        times = numel / max(1, prod(part))
        return WorkItem(
            tensor,
            rows,
            read_bytes=read,
            write_bytes=tensor.written_bytes(rows),
            workspace=workspace + tensor.form.workspace(numel, self.itemsize),
            flops=(2 if twice else 1) * sum(cost.flops for cost in costs) * times,
            eigen_flops=sum(cost.eigen for cost in costs) * times,
            statistics_bytes=measured * torch.float32.itemsize,
            at_once=at_once,
            tensor_pass=tensor_pass,
            pass_bytes=_pass_bytes(merge, base, experts) if tensor_pass else 0,
        )

    def _of_matrices(
        self, tensor: TensorPlan, merge: Merge, shape: tuple[int, ...], part: tuple[int, ...]
    ) -> list[Cost]:
        """Return costs of method and encoding for each matrix; without matrices, for a part of the rows."""
        if merge.layout is None:
            shapes = [(part[0] if len(part) > 1 else 1, prod(part[1:] if len(part) > 1 else part))]
        else:
            shapes = list(matrix_shapes(shape, merge.layout))
        method, count = merge.procedure, max(1, len(tensor.operands))
        cost_of, encoding = method.cost_for(merge.parameters), tensor.form.cost
        return [
            cost_of(*dims, count, self.itemsize) + encoding(*dims, self.itemsize) for dims in shapes
        ]

    def _held(self, tensor: TensorPlan, merge: Merge, numel: int, *, twice: bool) -> int:
        """Return the bytes of updates and merged update in the compute dtype, and of the base if needed."""
        method, count = merge.procedure, max(1, len(tensor.operands))
        # Together with other plans, a method that uses weights holds the updates too.
        updates = 2 * count if method.sees == "weights" and not self.alone else count
        terms = 0
        if self.summed(tensor):
            # The factors are held in the compute dtype twice: separately, and joined.
            terms = 2 * self._factor_elements(tensor)
            updates = 1 if self.alone else updates
        # A second result is held together with the difference between the two results.
        results = 2 + method.needs_base + (3 if twice else 0)
        return ((updates + results) * numel + terms) * self.itemsize

    def _factor_elements(self, tensor: TensorPlan) -> int:
        return sum(
            self.models[expert].checkpoint.low_rank[operand.tensor].elements
            for expert, operand in tensor.operands.items()
            if operand.tensor is not None
        )

    def _expert_bytes(self, tensor: TensorPlan, numel: int) -> dict[str, int]:
        return {
            expert: 0 if o.tensor is None else self.models[expert].stored_bytes(o.tensor, numel)
            for expert, o in tensor.operands.items()
        }


def shape_of(tensor: TensorPlan, rows: range | None) -> tuple[int, ...]:
    """Return the shape of some rows of a tensor."""
    shape = tensor.output.shape
    return shape if rows is None else (len(rows), *shape[1:])


def _base_bytes(tensor: TensorPlan, numel: int) -> int:
    read_with_experts = tensor.merge is not None and tensor.base in tensor.operands.values()
    unread = tensor.base is None or read_with_experts
    return 0 if unread else numel * tensor.stored.dtype.itemsize


def _of_tensor_pass(tensor: TensorPlan, merge: Merge, numel: int, merging: int) -> int:
    """Return the memory of a tensor pass, or of the merge after it if that needs more."""
    first_pass, count = merge.procedure.tensor_pass, max(1, len(tensor.operands))
    assert first_pass is not None
    entry_bytes = first_pass.entry_bytes(merge.parameters)
    held = entry_bytes > 0
    at_a_time = 1 if first_pass.together else experts_at_once(numel, count, held=held)
    return max(int(entry_bytes * numel * at_a_time), merging + count * numel // 8)


def _pass_bytes(merge: Merge, base: int, of_experts: Mapping[str, int]) -> int:
    """Return the bytes that a tensor pass reads: each expert with the base in turn, or all together."""
    method, given = merge.procedure, merge.parameters
    assert method.tensor_pass is not None
    if method.tensor_pass.together:
        return method.tensor_pass.readings(given) * (base + sum(of_experts.values()))
    experts = list(of_experts)
    return sum(
        method.tensor_pass.readings(method.for_experts(given, experts, [expert])) * (base + size)
        for expert, size in of_experts.items()
    )
