"""A first pass over a large tensor, by expert or all together, for methods that must know all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import TypeVar

import torch

from covmerge.base.threads import ThreadPool
from covmerge.base.types import LinearGroup
from covmerge.maths.methods import Method
from covmerge.maths.methods.registry import Known
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.work import WorkItem, looked_over_at_once
from covmerge.run.engine.inputs import Sources, weights_or_update
from covmerge.run.engine.layer import Context, naming
from covmerge.run.engine.thread_count import torch_threads, use_threads

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_WORK = "its look over the whole tensor"


def tensor_pass(
    item: WorkItem, merge: Merge, method: Method, sources: Sources, context: Context
) -> dict[str, Known]:
    """Return, by expert, what its rows must know of the whole tensor."""
    assert method.tensor_pass is not None
    inspect = method.tensor_pass.of
    shape = item.shape
    experts = list(item.tensor.operands)
    if method.tensor_pass.together:
        groups = partial(_groups, item, experts, method, sources, context)
        with naming(item.tensor), method.ending_in_words(_WORK), torch_threads(1):
            known = inspect(groups, shape, method.for_experts(merge.parameters, experts, experts))
        return dict.fromkeys(experts, known)

    def of(expert: str) -> Known:
        parameters = method.for_experts(merge.parameters, experts, [expert])
        groups = partial(_groups, item, [expert], method, sources, context)
        with naming(item.tensor), method.ending_in_words(_WORK):
            return inspect(groups, shape, parameters)

    held = method.tensor_pass.entry_bytes(merge.parameters) > 0
    together = looked_over_at_once(prod(shape), len(experts), held=held)
    return dict(zip(experts, in_lanes(of, experts, together), strict=True))


def in_lanes(do: Callable[[_In], _Out], given: Sequence[_In], most: int) -> list[_Out]:
    """Do something with each, a core each, on as many cores as torch has here, or fewer; in order.

    One core each, and not all for one: how many share a sum decides how it is rounded.
    """
    lanes = min(torch.get_num_threads(), len(given), most)
    if lanes < 2:
        with torch_threads(1):
            return [do(one) for one in given]
    with ThreadPool(lanes, initializer=use_threads, initargs=(1,)) as pool:
        return list(pool.map(do, given))


def _groups(
    item: WorkItem,
    names: Sequence[str],
    method: Method,
    sources: Sources,
    context: Context,
    experts: Sequence[int] | None = None,
) -> Iterator[LinearGroup]:
    """The part of one expert of the tensor, or of several, block after block."""
    assert item.at_once is not None
    by = method.sees == "weights"
    chosen = [names[place] for place in (range(len(names)) if experts is None else experts)]
    operands = [item.tensor.operands[name] for name in chosen]
    for part in item.parts(item.at_once):
        assert item.tensor.base is not None
        stored = sources.read_rows(item.tensor.base, part.rows)
        base = stored.to(context.device).to(context.dtype)
        tensors = tuple(
            weights_or_update(
                sources.read(operand, part.rows), base, context.dtype, context.device, weights=by
            )
            for operand in operands
        )
        yield LinearGroup(
            () if by else tensors,
            tuple(operand.weight for operand in operands),
            models=tensors if by else (),
            base=base if by else None,
            streams=tuple(item.tensor.stream(name, part.first_element) for name in chosen),
        )
