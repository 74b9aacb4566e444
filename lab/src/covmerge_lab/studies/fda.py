"""What FDA's inputs are worth to a merge by statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from covmerge_lab import collecting
from covmerge_lab.anchors import Effort, collect_anchors
from covmerge_lab.bench import Bench
from covmerge_lab.merging import Experts
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.studies.accuracy import bars, findings
from covmerge_lab.studies.generated import near
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Variant
from covmerge_lab.summary import Group
from covmerge_lab.workers import Job, OnProgress

_KIND = "anchors"
_AVERAGE = Merge("average")
_DATA = Merge("regmean", section=Section.WITH_DATA, label="regmean, data")
_ANCHORS = Merge("regmean", section=Section.OWN_INPUTS, label="regmean, anchors", statistics=_KIND)
_MEASURED = Merge(
    "auto_measured", section=Section.OWN_INPUTS, label="auto_measured, anchors", statistics=_KIND
)
_EFFORT = Effort()
_QUICK = Effort(sequences=2, length=5, steps=2)


class Anchors(Study):
    """FDA's inputs as statistics."""

    name = "anchors"
    about = (
        "What are the inputs worth that FDA makes (arXiv 2510.21223)? For each block and expert, sequences "
        "of vectors are moved until the gradient that they give the base points along the task vector. FDA "
        "trains the merged block on them; here RegMean and `auto_measured` are given their covariances, "
        "beside RegMean on those of data. "
        f"{_EFFORT.sequences} sequences of {_EFFORT.length} vectors and {_EFFORT.steps} steps a block, "
        "where the authors take 64, 5 to 50 and 1200."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        effort = _QUICK if bench.suite.quick else _EFFORT
        rows: list[list[str]] = []
        found: list[dict[str, Any]] = []

        def make(bench: Bench, experts: Experts) -> list[Model]:
            jobs: dict[str, Job[dict[str, Any]]] = {
                task: partial(_collect, experts, task, effort) for task in experts.whole
            }
            for task, of in bench.work(f"{experts.variant}: anchors", jobs).items():
                found.append({"variant": str(experts.variant), "task": task, **of})
                numbers = (of["before"], of["after"], of["cosine"])
                rows.append([str(experts.variant), task, *(f"{each:.3f}" for each in numbers)])
            return bench.merge(experts, [_AVERAGE, _DATA, _ANCHORS, _MEASURED], tuned=True)

        tables = findings(bench, variants, make, self.draw, statistics=["gram"])
        columns = ["experts", "task", "gradient along Δ before", "after", "cosine of covariances"]
        text = (
            "Mean over blocks of the cosine between the gradient and the task vector, before the inputs "
            "are moved and after, and mean over layers of the cosine between the covariance of what the "
            "layers see then and that of the task's examples:"
        )
        return Findings(
            {**tables.numbers, "anchors": found},
            "\n\n".join([tables.text, text, markdown(columns, rows)]),
            tables.pictures,
        )

    def draw(self, group: Group) -> Any:
        """Draw a bar for each."""
        titles = [each.title for each in (_DATA, _ANCHORS, _MEASURED, _AVERAGE)]
        return bars(
            group, titles, "RegMean and auto_measured, by the inputs that covariances are of"
        )


def _collect(
    experts: Experts, task: str, effort: Effort, on_progress: OnProgress
) -> dict[str, Any]:
    path = _file(experts, _KIND, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = collect_anchors(experts.suite.base, experts.whole[task], path, effort, on_progress)
    before, after = (fmean(each) for each in zip(*found, strict=True))
    return {
        "before": before,
        "after": after,
        "cosine": near(path, _file(experts, "gram", task)),
    }


def _file(experts: Experts, kind: str, task: str) -> Path:
    return collecting.files(experts.statistics, kind, [task])[task]
