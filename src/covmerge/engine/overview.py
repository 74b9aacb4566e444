"""A look over a large tensor, expert by expert, for methods that must know all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import TypeVar

import torch

from covmerge.engine.inputs import Sources, seen_of
from covmerge.engine.layer import Context, naming
from covmerge.engine.thread_count import torch_threads, use_threads
from covmerge.methods import Method
from covmerge.methods.registry import Known
from covmerge.plan import Merge, WorkItem, looked_over_at_once
from covmerge.types import LinearGroup

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def overview(
    item: WorkItem, merge: Merge, method: Method, sources: Sources, context: Context
) -> dict[str, Known]:
    """Return, by expert, what its rows must know of the whole tensor."""
    assert method.overview is not None
    look = method.overview.of
    shape = item.shape
    experts = list(item.tensor.operands)

    def of(expert: str) -> Known:
        own = method.for_experts(merge.parameters, experts, [expert])
        groups = partial(_groups, item, expert, method, sources, context)
        with naming(item.tensor):
            return look(groups, shape, own)

    together = looked_over_at_once(prod(shape), len(experts))
    return dict(zip(experts, in_lanes(of, experts, together), strict=True))


def in_lanes(do: Callable[[_In], _Out], given: Sequence[_In], most: int) -> list[_Out]:
    """Do something with each, a core each, on as many cores as torch has here, or fewer; in order.

    One core each, and not all for one: how many share a sum decides how it is rounded.
    """
    lanes = min(torch.get_num_threads(), len(given), most)
    if lanes < 2:
        with torch_threads(1):
            return [do(one) for one in given]
    with ThreadPoolExecutor(lanes, initializer=use_threads, initargs=(1,)) as pool:
        return list(pool.map(do, given))


def _groups(
    item: WorkItem, expert: str, method: Method, sources: Sources, context: Context
) -> Iterator[LinearGroup]:
    """One expert's part of the tensor, block after block."""
    assert item.at_once is not None
    operand, by = item.tensor.operands[expert], method.sees == "weights"
    for part in item.parts(item.at_once):
        assert item.tensor.base is not None
        stored = sources.read_rows(item.tensor.base, part.rows)
        base = stored.to(context.device).to(context.dtype)
        own = seen_of(
            sources.read(operand, part.rows), base, context.dtype, context.device, weights=by
        )
        yield LinearGroup(
            () if by else (own,),
            (operand.weight,),
            models=(own,) if by else (),
            base=base if by else None,
            streams=(item.tensor.stream(expert, part.first_element),),
        )
