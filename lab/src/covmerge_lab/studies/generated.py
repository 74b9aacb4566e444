"""What inputs that experts make themselves are worth: RegMean on them, beside RegMean on data.

Each way of making inputs gives one Gram matrix a layer and expert; how near it comes to that of the
task's own examples, what it costs, and what RegMean makes of it, stand side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from covmerge.errors import InputError, did_you_mean
from covmerge.plan.statistics.file import StatisticsFile
from covmerge_lab import collecting
from covmerge_lab.bench import Bench
from covmerge_lab.merging import REGMEAN_PP, Experts
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.own import DRAWN, WRITTEN
from covmerge_lab.studies.accuracy import bars, findings
from covmerge_lab.studies.covariance import cosine
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Kind, Suite, Variant
from covmerge_lab.summary import Group
from covmerge_lab.workers import Job, OnProgress

_DATA = Merge("regmean", section=Section.WITH_DATA, label="regmean, data")
_BEHIND = replace(REGMEAN_PP, label="regmean++, data")
_AVERAGE = Merge("average")
_ANOTHER = "data of the task after it"

# Cosines with what was measured, by task, and seconds for an expert.
Made = tuple[Mapping[str, float], float]


class OwnInputs(Study):
    """Statistics without anybody's data."""

    name = "generated"
    parts = (*WRITTEN, *DRAWN)
    about = (
        "What are inputs worth that experts make themselves? RegMean on the covariances that each way of "
        "making them gives, beside RegMean on 256 training examples of each task, and the average, which "
        "it is where all covariances are the same; RegMean++, of what blocks see behind merged ones, "
        "beside RegMean++. Below the table, by task: the mean cosine over layers of each covariance with "
        "the one measured in the same way, for comparison that of another task's data, and the seconds "
        "that an expert's inputs took."
    )

    def check(self, suite: Suite, kinds: Sequence[Kind]) -> None:
        for title in self.only:
            if title not in suite.own_inputs:
                raise InputError(
                    f"study '{self.name}': no expert of suite '{suite.name}' makes inputs as '{title}'."
                    f"{did_you_mean(title, suite.own_inputs)}"
                )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        ways = self.only or tuple(bench.suite.own_inputs)
        data = [_DATA]
        if any(_together(bench.suite, title) for title in ways):
            data.append(_BEHIND)
        merges = [_AVERAGE, *data, *(_merge(bench.suite, title) for title in ways)]
        seen: dict[str, dict[str, list[Made]]] = {}

        def make(bench: Bench, experts: Experts) -> list[Model]:
            made = {title: _jobs(experts, title) for title in ways}
            all_jobs = {name: job for jobs in made.values() for name, job in jobs.items()}
            seconds = bench.work(f"{experts.variant}: inputs that experts make", all_jobs)
            near: dict[str, Job[dict[str, float]]] = {
                title: partial(_cosines, experts, title) for title in (*ways, _ANOTHER)
            }
            cosines = bench.work(f"{experts.variant}: beside what was measured", near)
            of_kind = seen.setdefault(experts.variant.kind, {})
            for title in (*ways, _ANOTHER):
                took = sum(seconds[name] for name in made.get(title, ()))
                of_kind.setdefault(title, []).append((cosines[title], took / len(experts.whole)))
            return bench.merge(experts, merges, tuned=True)

        kinds = [_measured(together=merge is _BEHIND) for merge in data]
        found = findings(bench, variants, make, self.draw, statistics=kinds)
        inputs = {kind: {t: _mean(seeds) for t, seeds in of.items()} for kind, of in seen.items()}
        return Findings(
            {**found.numbers, "inputs": inputs},
            "\n\n".join([found.text, *(_table(kind, of) for kind, of in inputs.items())]),
            found.pictures,
        )

    def draw(self, group: Group) -> Any:
        """Draw a bar for each way."""
        own = [row.title for row in group.rows if row.section is Section.OWN_INPUTS]
        data = [row.title for row in group.rows if row.section is Section.WITH_DATA]
        return bars(
            group,
            [*data, *own, _AVERAGE.title],
            "RegMean and RegMean++, by the inputs that covariances are of",
        )


def _kind(title: str) -> str:
    """The name of the statistics of one way."""
    return f"own, {title}"


def _together(suite: Suite, title: str) -> bool:
    """Whether the inputs of all experts go through merged blocks."""
    return suite.own_inputs[title].protocol == "regmean++"


def _measured(*, together: bool) -> str:
    """The kind of statistics of data that stands beside."""
    return "regmean++" if together else "gram"


def _merge(suite: Suite, title: str) -> Merge:
    like = _BEHIND if _together(suite, title) else _DATA
    return replace(like, section=Section.OWN_INPUTS, label=title, statistics=_kind(title))


def _jobs(experts: Experts, title: str) -> dict[str, Job[float]]:
    """What makes the inputs of all experts, and returns the seconds it took."""
    if _together(experts.suite, title):
        return {title: partial(_make_together, experts, title)}
    return {f"{title}, {task}": partial(_make, experts, title, task) for task in experts.whole}


def _make(experts: Experts, title: str, task: str, on_progress: OnProgress) -> float:
    suite, out = experts.suite, experts.statistics
    own, kind = suite.own_inputs[title], _kind(title)
    return collecting.on_own_inputs(suite, own, kind, task, experts.whole, out, on_progress)


def _make_together(experts: Experts, title: str, on_progress: OnProgress) -> float:
    suite, out = experts.suite, experts.statistics
    own, kind = suite.own_inputs[title], _kind(title)
    return collecting.on_own_inputs_together(suite, own, kind, experts.whole, out, on_progress)


def _cosines(experts: Experts, title: str, on_progress: OnProgress) -> dict[str, float]:
    """Return the mean cosine over layers with what was measured, by task."""
    tasks = list(experts.whole)
    together = title != _ANOTHER and _together(experts.suite, title)
    measured = collecting.files(experts.statistics, _measured(together=together), tasks)
    if title == _ANOTHER:
        following = [*tasks[1:], tasks[0]]
        files = {task: measured[other] for task, other in zip(tasks, following, strict=True)}
    else:
        files = collecting.files(experts.statistics, _kind(title), tasks)
    found: dict[str, float] = {}
    for task in tasks:
        found[task] = near(files[task], measured[task])
        on_progress(len(found), len(tasks))
    return found


def near(made: Path, measured: Path) -> float:
    """Return the mean cosine over layers between the Gram matrices of two files."""
    with closing(StatisticsFile.open(made)) as one, closing(StatisticsFile.open(measured)) as other:
        names = [name for name in one.names("gram") if name in other.names("gram")]
        return fmean(
            cosine(one.read("gram", name).double(), other.read("gram", name).double())
            for name in names
        )


def _mean(seeds: Sequence[Made]) -> dict[str, Any]:
    tasks = list(seeds[0][0])
    return {
        "cosine": {task: fmean(cosines[task] for cosines, _ in seeds) for task in tasks},
        "seconds": fmean(seconds for _, seconds in seeds),
    }


def _table(kind: str, inputs: Mapping[str, Mapping[str, Any]]) -> str:
    tasks = list(next(iter(inputs.values()))["cosine"])
    rows = [
        [
            title,
            *(f"{of['cosine'][task]:.3f}" for task in tasks),
            f"{fmean(of['cosine'].values()):.3f}",
            f"{of['seconds']:.1f}" if of["seconds"] else "",
        ]
        for title, of in inputs.items()
    ]
    table = markdown(["inputs", *tasks, "mean", "s"], rows)
    return f"Mean cosine with the measured covariance, {kind} experts:\n\n{table}"
