"""Which tensors of a merged model are computed again, and which by a reference implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from math import prod
from typing import Any, TypeVar

from covmerge.base.types import LinearGroup, Merged
from covmerge.files.tensors.views import matrix_shapes
from covmerge.maths.methods import Method, registry
from covmerge.maths.reference import REFERENCES
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.work import TensorPlan

# A reference implementation forms a d × d matrix of every expert, d the longer side, and multiplies
# updates with it: so many float64 numbers (a few of 0.8 GB are alive at once), so many
# multiplications (minutes).
_MOST_NUMBERS = 10**8
_MOST_PRODUCTS = 5 * 10**10

_T = TypeVar("_T")


def by_reference(name: str) -> Method:
    """A registered method, carried out by its reference implementation on dense updates."""
    method = registry.get(name)

    @wraps(method.kernel)  # with its parameters
    def kernel(group: LinearGroup, **parameters: Any) -> Merged:
        return Merged(REFERENCES[name](group, **parameters))

    return replace(method, kernel=kernel, factored="none", writes_masks=False, tensor_pass=None)


def choose(plan: Plan, count: int) -> dict[str, str]:
    """Take so many of the merged tensors, evenly, first those that a reference implementation can do.

    A method of which no tensor is within its reference implementation's reach is not passed over.

    Returns:
        By name, why it is not for a reference implementation; "" where it is.
    """
    reasons = {
        t.name: _beyond_a_reference(t, t.operation)
        for t in plan.tensors
        if isinstance(t.operation, Merge)
    }
    methods = {t.name: t.operation.method for t in plan.tensors if isinstance(t.operation, Merge)}
    reached = {methods[name] for name, reason in reasons.items() if not reason}
    first = [name for name, reason in reasons.items() if not reason or methods[name] not in reached]
    rest = [name for name in reasons if name not in set(first)]
    chosen = {*_evenly(first, count), *_evenly(rest, count - len(first))}
    return {name: reason for name, reason in reasons.items() if name in chosen}


def _beyond_a_reference(tensor: TensorPlan, merge: Merge) -> str:
    """Why no reference implementation computes a tensor; "" where one does."""
    if merge.method not in REFERENCES:
        return f"'{merge.method}' has no reference implementation"
    unit = registry.get(merge.method).unit_for(merge.parameters)
    shape, count = tensor.stored.shape, len(tensor.operands)
    numbers = products = 0
    if merge.layout is not None:
        shapes = matrix_shapes(shape, merge.layout)
        steps = merge.parameters["iterations"] if merge.parameters.get("solver") == "adam" else 1
        numbers = count * max(max(sides) ** 2 for sides in shapes)
        products = count * sum(prod(sides) * max(sides) for sides in shapes) * steps
    elif unit == "tensor":
        numbers = count * prod(shape)
    if numbers > _MOST_NUMBERS or products > _MOST_PRODUCTS:
        return f"{' × '.join(map(str, shape))} of {count} experts is too large for one"
    return ""


def _evenly(names: Sequence[_T], count: int) -> list[_T]:
    """Take so many, from the first to the last."""
    count = max(0, min(count, len(names)))
    steps = max(1, count - 1)
    return [names[place * (len(names) - 1) // steps] for place in range(count)]
