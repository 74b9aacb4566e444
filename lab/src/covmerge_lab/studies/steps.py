"""What steps around a method are worth: each alone, before or after some methods, all at their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import covmerge
from covmerge.steps import registry
from covmerge_lab.bench import Bench
from covmerge_lab.merging import Experts
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.studies.accuracy import bars, findings
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.suite import Variant
from covmerge_lab.summary import Group
from covmerge_lab.workers import Job, MergeSteps, OnProgress

# One that adds, one that elects, and those that lead without data on full fine-tunes and on adapters.
METHODS = ("task_arithmetic", "ties", "tsv_m", "iso_c", "auto")


class StepsAroundMethods(Study):
    """Pico, PACT, norm balancing, SVC and rescaling."""

    name = "steps"
    parts = METHODS
    about = (
        "What is a step worth, before a method or after it? Every step alone, at its defaults, around "
        "methods at theirs; `auto` by the weights alone."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        return findings(bench, variants, self._models, self.draw)

    def draw(self, group: Group) -> Any:
        """Draw a bar for each."""
        return bars(group, [_title(*pair) for pair in self._pairs()], "Steps around methods")

    def _pairs(self) -> list[tuple[str, str]]:
        """The methods that are asked for, each alone and with each step."""
        return [(method, step) for method in self.only or METHODS for step in _STEPS]

    def _models(self, bench: Bench, experts: Experts) -> list[Model]:
        jobs: dict[str, Job[Model]] = {
            _title(*pair): partial(_merged, experts, *pair) for pair in self._pairs()
        }
        found = bench.work(f"{experts.variant}: merging by {len(jobs)} ways", jobs)
        return [*found.values(), *bench.merge(experts, (), tuned=True)]


_STEPS = ("", *(step.name for step in registry))


def _title(method: str, step: str) -> str:
    if not step:
        return method
    pair = (step, method) if registry.get(step).when == "before" else (method, step)
    return ", then ".join(pair)


def _merged(experts: Experts, method: str, step: str, on_progress: OnProgress) -> Model:
    title = _title(method, step)
    out = experts.work / title
    steps = [step] if step else []
    before = bool(step) and registry.get(step).when == "before"
    covmerge.merge(
        experts.base,
        experts.folders,
        method,
        out,
        before=steps if before else [],
        after=[] if before else steps,
        tensors={"few_rows": "allow"},  # as all merges of the tables
        overwrite=True,
        progress=MergeSteps(on_progress),
    )
    return Model(
        Section.DATA_FREE, title, dict.fromkeys(experts.folders, out), Merge(method, label=title)
    )
