"""The passes before a merge: how large must an entry of each expert be to be kept?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from covmerge.engine.budget import is_narrow
from covmerge.engine.inputs import Inputs, Sources, in_parts, read_inputs
from covmerge.engine.worker import Context, Layer
from covmerge.linalg.select import MagnitudeSelect, threshold_rank
from covmerge.plan import Merge, Plan, Survey, WorkItem

_ItemsOf = Callable[[Survey], Sequence[WorkItem]]
_Numbered = Sequence[tuple[int, WorkItem]]  # plans, by number, with their item of the same rows
Thresholds = Mapping[str, Mapping[str, float]]  # Merge.key -> expert -> threshold
_Selects = Mapping[str, Mapping[str, MagnitudeSelect]]


def run_surveys(
    plans: Sequence[Plan],
    sources: Sources,
    context: Context,
    advance: Callable[[str, int], None],
    *,
    lanes: int,
    in_flight: int,
) -> list[Thresholds]:
    """Find the exact threshold of every expert under every survey, for each of the plans.

    A sample of the rows tells nearly what each threshold is; with that guess one pass over all
    rows settles a float32. Each pass reads the tensors once for all surveys; memory is
    that of the items in flight and of 2¹⁷ counters per survey and expert.

    Args:
        plans: plans whose items are the same rows of the same tensors.
        sources: the checkpoints.
        context: what the work needs to know.
        advance: hears of every item of every pass, and how many bytes were read.
        lanes: small items that are counted at once, on a core each.
        in_flight: bytes of inputs that may be held, at least those of one item.

    Raises:
        TensorError: NaN or Inf in the inputs.
    """
    found: list[Thresholds] = [{} for _ in plans]
    for items_of in (_sample_of, _items_of):
        selects = _selects(plans, items_of, found, context.dtype)
        unsettled = [s for own in selects for experts in own.values() for s in experts.values()]
        together = list(_together(plans, items_of))
        count = partial(_count, selects=selects, sources=sources, context=context)
        while any(not select.settled for select in unsettled):
            _each(together, count, context.device, advance, lanes, in_flight)
            for select in unsettled:
                if not select.settled:
                    select.end_pass()
        found = [
            {
                key: {expert: select.value for expert, select in experts.items()}
                for key, experts in own.items()
            }
            for own in selects
        ]
    return found


def _selects(
    plans: Sequence[Plan], items_of: _ItemsOf, guesses: Sequence[Thresholds], dtype: torch.dtype
) -> list[_Selects]:
    """One selection for each expert of each survey, near the threshold that is guessed."""
    return [
        {
            survey.merge.key: {
                expert: MagnitudeSelect(
                    partial(threshold_rank, survey.density),
                    dtype,
                    near=guessed.get(survey.merge.key, {}).get(expert),
                )
                for expert in {e: None for item in survey.items for e in item.tensor.sources}
            }
            for survey in plan.surveys
            if items_of(survey)
        }
        for plan, guessed in zip(plans, guesses, strict=True)
    ]


def _count(
    numbered: _Numbered, *, selects: Sequence[_Selects], sources: Sources, context: Context
) -> None:
    """Read some rows, and add them to the selections of every plan."""
    inputs = read_inputs([item for _, item in numbered], sources)
    parts: Iterable[tuple[_Numbered, Inputs]] = [(numbered, inputs)]
    if len(numbered) == 1:
        ((number, item),) = numbered
        parts = (([(number, part)], own) for part, own in in_parts(item, inputs, context.device))
    for part, own in parts:
        layer = Layer([item for _, item in part], own, context)
        for number, item in part:
            action = item.tensor.action
            assert isinstance(action, Merge)
            for expert, vector in layer.survey_vectors(item, action):
                select = selects[number][action.key][expert]
                if not select.settled:
                    select.add(vector)


def survey_bytes(plans: Sequence[Plan]) -> int:
    """Bytes that the surveys of all plans read together, if all guesses are good."""
    dtype = plans[0].recipe.dtype
    each = [survey.passes(dtype) for plan in plans for survey in plan.surveys]
    if not each:
        return 0
    sampling, counting = (max(passes) for passes in zip(*each, strict=True))
    return sum(
        passes * numbered[0][1].read_bytes
        for passes, items_of in ((sampling, _sample_of), (counting, _items_of))
        for numbered in _together(plans, items_of)
    )


def _sample_of(survey: Survey) -> Sequence[WorkItem]:
    return survey.sample


def _items_of(survey: Survey) -> Sequence[WorkItem]:
    return survey.items


def _together(plans: Sequence[Plan], items_of: _ItemsOf) -> Iterator[list[tuple[int, WorkItem]]]:
    """The surveyed items of all plans, those of the same rows together: rows are read once."""
    by_rows: dict[tuple[str, tuple[int, int]], list[tuple[int, WorkItem]]] = {}
    for number, plan in enumerate(plans):
        for survey in plan.surveys:
            for item in items_of(survey):
                by_rows.setdefault(item.key, []).append((number, item))
    yield from by_rows.values()


def _each(
    together: Sequence[_Numbered],
    count: Callable[[_Numbered], None],
    device: torch.device,
    advance: Callable[[str, int], None],
    lanes: int,
    in_flight: int,
) -> None:
    """Read and count every item: small ones beside each other, large ones alone on all cores."""
    with ThreadPoolExecutor(
        lanes, "covmerge-survey", initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        running: deque[tuple[WorkItem, Future[None]]] = deque()

        def finish(item: WorkItem, counting: Future[None]) -> None:
            counting.result()
            advance(f"thresholds, {item.tensor.name}", item.read_bytes)

        try:
            for numbered in together:
                first = numbered[0][1]
                narrow = is_narrow(first, device)
                while running and not (
                    narrow
                    and len(running) < lanes
                    and sum(item.read_bytes for item, _ in running) + first.read_bytes <= in_flight
                ):
                    finish(*running.popleft())
                if narrow:
                    running.append((first, pool.submit(count, numbered)))
                else:
                    count(numbered)
                    advance(f"thresholds, {first.tensor.name}", first.read_bytes)
            while running:
                finish(*running.popleft())
        finally:
            for _, counting in running:
                counting.cancel()
