"""Parameters that only the plan of all tensors can settle, of methods that follow mergekit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from typing import Any

import torch

from covmerge.maths.methods.arithmetic import STORED
from covmerge.maths.methods.mergekit import IN_ORDER, Drawn, places
from covmerge.plan.planning.operations import Merge, Operand
from covmerge.plan.planning.work import TensorPlan

DtypeOf = Callable[[str, Operand], torch.dtype]  # of an expert's operand


def as_mergekit(tensors: Sequence[TensorPlan], dtype_of: DtypeOf) -> tuple[TensorPlan, ...]:
    """Return the tensors with `arithmetic: stored` and `drawn: in_order` as what they come to.

    The first is the dtype in which base and experts store a tensor, the widest where these differ; the
    second counts the random numbers that are drawn for the tensors whose names come before it.
    """
    by_dtype = [_with_dtype(tensor, dtype_of) for tensor in tensors]
    drawn = {
        tensor.name: _drawn(tensor)
        for tensor in by_dtype
        if _parameters(tensor).get("drawn") == IN_ORDER
    }
    found = places(drawn)
    return tuple(
        _with(tensor, "drawn", found[tensor.name]) if tensor.name in found else tensor
        for tensor in by_dtype
    )


def _parameters(tensor: TensorPlan) -> dict[str, Any]:
    operation = tensor.operation
    return dict(operation.parameters) if isinstance(operation, Merge) else {}


def _with(tensor: TensorPlan, parameter: str, value: object) -> TensorPlan:
    operation = tensor.operation
    assert isinstance(operation, Merge)
    parameters = {**operation.parameters, parameter: value}
    return replace(tensor, operation=replace(operation, parameters=parameters))


def _with_dtype(tensor: TensorPlan, dtype_of: DtypeOf) -> TensorPlan:
    if _parameters(tensor).get("arithmetic") != STORED:
        return tensor
    held = [
        dtype_of(expert, operand)
        for expert, operand in tensor.operands.items()
        if operand.tensor is not None
    ]
    widest = reduce(torch.promote_types, held, tensor.stored.dtype)
    return _with(tensor, "arithmetic", str(widest).removeprefix("torch."))


def _drawn(tensor: TensorPlan) -> Drawn:
    given = _parameters(tensor)
    density: float | list[float] = given["density"]
    densities = density if isinstance(density, list) else [density] * len(tensor.operands)
    return Drawn(given["sparsify"], densities, prod(tensor.stored.shape))
