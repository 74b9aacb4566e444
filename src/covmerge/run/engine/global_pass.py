"""The passes before a merge that find how large an entry of each expert must be to be kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

from covmerge.plan.planning.types import Plan, PlannedPass
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.executor import Batch, Done
from covmerge.run.engine.selection import Selections, Thresholds

_ItemsOf = Callable[[PlannedPass], Sequence[WorkItem]]
# A function that does one pass over some rows and adds to the selections.
_Pass = Callable[[Sequence[Batch], Selections], Generator[Done]]


def find_thresholds(
    plans: Sequence[Plan], count: _Pass, advance: Callable[[str, int], None]
) -> list[Thresholds]:
    """Find the exact threshold of every expert under every global pass, for each of the plans.

    A sample of the rows gives a good guess of each threshold. With that guess, one pass over all rows
    settles a float32 threshold. Each pass reads the tensors once for all global passes. The memory is
    that of the items in flight and of 2¹⁹ counters per global pass and expert.

    `advance` is called for every batch of every pass, with its part of `global_pass_bytes`.

    Raises:
        TensorError: NaN or Inf in the inputs.
    """
    found: list[Thresholds] = [{} for _ in plans]
    for items_of, expected in zip((_sample_of, _items_of), _passes(plans), strict=True):
        global_passes = [
            [global_pass for global_pass in plan.global_passes if items_of(global_pass)]
            for plan in plans
        ]
        selections = Selections(global_passes, plans[0].compute_dtype, found)
        batches = _together(plans, items_of)
        passes = 0
        while not selections.settled:
            passes += 1
            with closing(count(batches, selections)) as counted:
                for done in counted:
                    first = batches[done.index][0]
                    if done.number == 0:
                        # A pass more than expected is not in the total (`global_pass_bytes`).
                        size = first.read_bytes if passes <= expected else 0
                        advance(f"thresholds, {first.tensor.name}", size)
            selections.end_pass()
        found = selections.thresholds()
    return found


def global_pass_bytes(plans: Sequence[Plan]) -> int:
    """Return the bytes that the global passes of all plans read together, if all guesses are good."""
    return sum(
        passes * size
        for passes, items_of in zip(_passes(plans), (_sample_of, _items_of), strict=True)
        for size in _sizes(plans, items_of)
    )


def _passes(plans: Sequence[Plan]) -> tuple[int, int]:
    """Return the number of passes over the samples and over all items, if all guesses are good."""
    dtype = plans[0].recipe.dtype
    each = [global_pass.passes(dtype) for plan in plans for global_pass in plan.global_passes]
    sampling, counting = zip(*each, strict=True) if each else ((0,), (0,))
    return max(sampling), max(counting)


def _sizes(plans: Sequence[Plan], items_of: _ItemsOf) -> Iterable[int]:
    """Return the bytes of each range of rows that global passes read; shared rows count once."""
    global_passes = [global_pass for plan in plans for global_pass in plan.global_passes]
    return {item.key: item.read_bytes for one in global_passes for item in items_of(one)}.values()


def _sample_of(global_pass: PlannedPass) -> Sequence[WorkItem]:
    return global_pass.sample


def _items_of(global_pass: PlannedPass) -> Sequence[WorkItem]:
    return global_pass.items


def _together(plans: Sequence[Plan], items_of: _ItemsOf) -> list[Batch]:
    """Return batches of the counted items of all plans; items of the same rows share a batch."""
    by_rows: dict[tuple[str, tuple[int, int]], list[WorkItem]] = {}
    for number, plan in enumerate(plans):
        for global_pass in plan.global_passes:
            for item in PlannedPass.counting(items_of(global_pass), number):
                by_rows.setdefault(item.key, []).append(item)
    return [tuple(items) for items in by_rows.values()]
