"""The passes before a merge: how large must an entry of each expert be to be kept?"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

from covmerge.plan.planning import Plan, Survey, WorkItem
from covmerge.run.engine.executor import Batch, Done
from covmerge.run.engine.selection import Selections, Thresholds

_ItemsOf = Callable[[Survey], Sequence[WorkItem]]
# Does one pass over some rows, and adds to the selections.
_Pass = Callable[[Sequence[Batch], Selections], Generator[Done]]


def find_thresholds(
    plans: Sequence[Plan], count: _Pass, advance: Callable[[str, int], None]
) -> list[Thresholds]:
    """Find the exact threshold of every expert under every survey, for each of the plans.

    A sample of the rows tells nearly what each threshold is; with that guess one pass over all
    rows settles a float32. Each pass reads the tensors once for all surveys; memory is
    that of the items in flight and of 2¹⁹ counters per survey and expert.

    Args:
        plans: plans whose items are the same rows of the same tensors.
        count: does the work of one pass.
        advance: called for every batch of every pass, with the bytes of `survey_bytes` that it was.

    Raises:
        TensorError: NaN or Inf in the inputs.
    """
    found: list[Thresholds] = [{} for _ in plans]
    for items_of, expected in zip((_sample_of, _items_of), _passes(plans), strict=True):
        surveys = [[survey for survey in plan.surveys if items_of(survey)] for plan in plans]
        selections = Selections(surveys, plans[0].compute_dtype, found)
        batches = _together(plans, items_of)
        passes = 0
        while not selections.settled:
            passes += 1
            with closing(count(batches, selections)) as counted:
                for done in counted:
                    first = batches[done.index][0]
                    if done.number == 0:
                        # A pass more than was expected is no part of the total (`survey_bytes`).
                        size = first.read_bytes if passes <= expected else 0
                        advance(f"thresholds, {first.tensor.name}", size)
            selections.end_pass()
        found = selections.thresholds()
    return found


def survey_bytes(plans: Sequence[Plan]) -> int:
    """Bytes that the surveys of all plans read together, if all guesses are good."""
    return sum(
        passes * size
        for passes, items_of in zip(_passes(plans), (_sample_of, _items_of), strict=True)
        for size in _sizes(plans, items_of)
    )


def _passes(plans: Sequence[Plan]) -> tuple[int, int]:
    """Passes over the samples and over the items of all surveys together, if all guesses are good."""
    dtype = plans[0].recipe.dtype
    each = [survey.passes(dtype) for plan in plans for survey in plan.surveys]
    sampling, counting = zip(*each, strict=True) if each else ((0,), (0,))
    return max(sampling), max(counting)


def _sizes(plans: Sequence[Plan], items_of: _ItemsOf) -> Iterable[int]:
    """Bytes of the rows that plans survey, each once."""
    surveys = [survey for plan in plans for survey in plan.surveys]
    return {item.key: item.read_bytes for one in surveys for item in items_of(one)}.values()


def _sample_of(survey: Survey) -> Sequence[WorkItem]:
    return survey.sample


def _items_of(survey: Survey) -> Sequence[WorkItem]:
    return survey.items


def _together(plans: Sequence[Plan], items_of: _ItemsOf) -> list[Batch]:
    """The surveyed items of all plans, those of the same rows together: rows are read once."""
    by_rows: dict[tuple[str, tuple[int, int]], list[WorkItem]] = {}
    for number, plan in enumerate(plans):
        for survey in plan.surveys:
            for item in Survey.counting(items_of(survey), number):
                by_rows.setdefault(item.key, []).append(item)
    return [tuple(items) for items in by_rows.values()]
