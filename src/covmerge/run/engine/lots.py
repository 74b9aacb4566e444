"""Lots: neighbouring items of one shape that are merged in one batch, fixed by the plan alone.

A batch rounds by its size, so the same work must fall into the same lots whenever it is done: neither the
memory that is free, nor what an earlier run has finished, has a say in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import Any, TypeVar

import torch

from covmerge.plan.planning import Merge, Plan, WorkItem

# Places of items in their plan, ascending.
Lot = tuple[int, ...]
_T = TypeVar("_T")

# Where a batch gains nothing: LAPACK is called matrix by matrix on a CPU, and Apple's GPUs have no float64.
_LOOPED = ("cpu", "mps")
# The items of a lot are among so many of the plan, so that files are read in about their order.
_NEAR = 64
# Entries of a matrix above which one is enough for a GPU: on an H100 a batch takes 0.13 to 1.03 of the
# time of the loop up to 768 × 768, and of 768 × 3072 up to 3.8 times as long.
_LARGE = 2**20
# A lot takes no more memory than the largest item does by itself, or than this.
_ROOM = 64 * 2**20


def lots_of(plan: Plan, device: torch.device) -> tuple[Lot, ...]:
    """Return the lots of a plan on a device, by their first items; what is in none goes by itself."""
    if device.type in _LOOPED:
        return ()
    workspace = max([_ROOM, *(item.workspace for item in plan.items)])
    moved = max([_ROOM, *(_moved(item) for item in plan.items)])
    lots: list[list[int]] = []
    latest: dict[Any, list[int]] = {}
    for place, item in enumerate(plan.items):
        kind = _kind(item)
        if kind is None:
            continue
        lot = latest.get(kind)
        if lot is not None and place - lot[0] < _NEAR:
            together = [plan.items[other] for other in (*lot, place)]
            if (
                sum(own.workspace for own in together) <= workspace
                and sum(map(_moved, together)) <= moved
            ):
                lot.append(place)
                continue
        latest[kind] = [place]
        lots.append(latest[kind])
    return tuple(tuple(lot) for lot in lots if len(lot) > 1)


def in_lots(count: int, lots: Sequence[Lot]) -> Iterator[Lot]:
    """Yield all places, those of a lot together where its first is; the others are a lot each.

    Example:
        >>> list(in_lots(5, [(1, 3)]))
        [(0,), (1, 3), (2,), (4,)]
    """
    begun = {lot[0]: lot for lot in lots}
    others = {place for lot in lots for place in lot[1:]}
    for place in range(count):
        if place not in others:
            yield begun.get(place, (place,))


def gathered(
    pairs: Iterable[tuple[int, _T]], lots: Sequence[Lot]
) -> Iterator[list[tuple[int, _T]]]:
    """Yield what belongs together, of pairs in the order of `in_lots` from which whole lots may be missing.

    Example:
        >>> list(gathered([(1, "b"), (3, "d"), (4, "e")], [(1, 3)]))
        [[(1, 'b'), (3, 'd')], [(4, 'e')]]
    """
    sizes = {lot[0]: len(lot) for lot in lots}
    given = iter(pairs)
    for place, own in given:
        yield [(place, own), *islice(given, sizes.get(place, 1) - 1)]


def _kind(item: WorkItem) -> Any:
    """What all items of a lot have in common; None: it is for no batch."""
    merge = item.tensor.operation
    if not isinstance(merge, Merge) or merge.procedure.batched is None:
        return None
    if item.overview or item.thin or item.at_once is not None or prod(item.shape) > _LARGE:
        return None
    operands = item.tensor.operands.items()
    experts = tuple((name, own.weight, own.tensor is None) for name, own in operands)
    return item.shape, merge.key, merge.layout, experts, item.tensor.stored.dtype


def _moved(item: WorkItem) -> int:
    return item.held_bytes + item.statistics_bytes + item.write_bytes
