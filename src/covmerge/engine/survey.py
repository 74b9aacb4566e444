"""The passes before a merge: how large must an entry of each expert be to be kept?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

from covmerge.engine.inputs import Inputs, Sources, read_inputs
from covmerge.engine.worker import Context, Layer
from covmerge.linalg.select import MagnitudeSelect
from covmerge.plan import SURVEY_PASSES, Merge, Plan, Survey, WorkItem

Thresholds = Mapping[str, Mapping[str, float]]  # Merge.key -> expert -> threshold


def run_surveys(
    plans: Sequence[Plan],
    sources: Sources,
    context: Context,
    advance: Callable[[str, int], None],
) -> Thresholds:
    """Find the exact threshold of every expert under every survey of the plans.

    Each pass reads the tensors once for all surveys, one item ahead of the counting; memory is that
    of two items and of 2¹⁶ counters per survey and expert.

    Args:
        plans: plans whose items are the same rows of the same tensors.
        sources: the checkpoints.
        context: what the work needs to know.
        advance: hears of every item of every pass, and how many bytes were read.

    Raises:
        TensorError: NaN or Inf in the inputs.
    """
    surveys = {survey.merge.key: survey for plan in plans for survey in plan.surveys}
    together = list(_together(surveys.values()))
    selects = {
        key: {
            expert: MagnitudeSelect(size - int(survey.density * size), context.dtype)
            for expert, size in _sizes(survey).items()
        }
        for key, survey in surveys.items()
    }
    unsettled = [s for by_expert in selects.values() for s in by_expert.values()]
    while any(not select.settled for select in unsettled):
        for items, inputs in _read_ahead(together, sources):
            layer = Layer(items, inputs, context)
            for item in items:
                action = item.tensor.action
                assert isinstance(action, Merge)
                for expert, vector in layer.survey_vectors(item, action).items():
                    if not selects[action.key][expert].settled:
                        selects[action.key][expert].add(vector)
            advance(f"thresholds, {items[0].tensor.name}", items[0].read_bytes)
        for select in unsettled:
            if not select.settled:
                select.end_pass()
    return {
        key: {expert: select.value for expert, select in by_expert.items()}
        for key, by_expert in selects.items()
    }


def survey_bytes(plans: Sequence[Plan]) -> int:
    """Bytes that the surveys of all plans read together."""
    surveys = [survey for plan in plans for survey in plan.surveys]
    read = sum(items[0].read_bytes for items in _together(surveys))
    return SURVEY_PASSES[plans[0].recipe.dtype] * read


def _together(surveys: Iterable[Survey]) -> Iterator[list[WorkItem]]:
    """The items of all surveys, those of the same rows together, so that rows are read once."""
    by_rows: dict[tuple[str, tuple[int, int]], list[WorkItem]] = {}
    for survey in surveys:
        for item in survey.items:
            by_rows.setdefault(item.key, []).append(item)
    yield from by_rows.values()


def _sizes(survey: Survey) -> dict[str, int]:
    """Entries of each expert that the survey goes through."""
    sizes: dict[str, int] = {}
    for item in survey.items:
        tensor = item.tensor
        rows = 1 if item.rows is None else len(item.rows)
        for expert in tensor.sources:
            sizes[expert] = sizes.get(expert, 0) + rows * prod(tensor.stored.shape[1:])
    return sizes


def _read_ahead(
    together: Sequence[Sequence[WorkItem]], sources: Sources
) -> Iterator[tuple[Sequence[WorkItem], Inputs]]:
    with ThreadPoolExecutor(1, thread_name_prefix="covmerge-survey") as reader:
        coming = reader.submit(read_inputs, together[0], sources) if together else None
        for number, items in enumerate(together, start=1):
            assert coming is not None
            inputs = coming.result()
            if number < len(together):
                coming = reader.submit(read_inputs, together[number], sources)
            yield items, inputs
