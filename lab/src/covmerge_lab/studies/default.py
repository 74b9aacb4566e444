"""What every part of the default, `auto`, is worth, and how much its constants matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from covmerge_lab import merging
from covmerge_lab.bench import Bench
from covmerge_lab.collecting import BASE
from covmerge_lab.merging import TUNED, Experts
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.studies import rule
from covmerge_lab.studies.accuracy import bars, findings
from covmerge_lab.studies.regimes import MIXED, changed_experts
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.suite import Variant
from covmerge_lab.summary import Group
from covmerge_lab.workers import Job, OnProgress

ALONE = ", weights alone"

PARTS: Mapping[str, Mapping[str, Any]] = {
    "auto": {},
    "least squares alone": {"dense": 0.0, "sparse": 0.0, "length": "start"},
    "least squares, length of the sum": {"dense": 0.0, "sparse": 0.0},
    "sum in place of least squares": {"start": "sum"},
    "flat spectrum": {"dense": 1.0, "sparse": 1.0, "power": None},
    "however alike": {"power": None},
    "however unevenly they use directions": {"uneven": None},
    "length of least squares": {"length": "start"},
    "copies add up": {"length": "sum"},
    "however long": {"long": None},
    "however long beside the base": {"beside": None},
}
CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    f"{name} {value}": {name: value}
    for name, values in {
        "ridge": (0.01, 0.03, 0.3, 1.0),
        "small": (0.001, 0.1),
        "long": (1.5, 3.0),
        "faint": (0.001, 0.1),
        "dense": (0.25, 0.4, 0.6, 0.75),
        "sparse": (0.5, 0.65, 0.85, 1.0),
        "untold": (0.0, 0.03, 0.3),
        "power": (1.0, 4.0),
        "uneven": (0.5, 2.0),
        "unfelt": (1e-5, 1e-3),
        "beside": (0.1, 0.12, 0.2, 0.3),
    }.items()
    for value in values
}
TOLD: Mapping[str, Mapping[str, Any]] = {
    **{f"told {share}": {"told": share} for share in (0.0, 0.25, 0.5, 0.75, 1.0)},
    **{f"unused {value}": {"unused": value} for value in (1e-5, 1e-3)},
}
_WITH_INPUTS = {**PARTS, **CONSTANTS}
_ALONE = {title + ALONE: given for title, given in {**PARTS, **TOLD}.items()}
_TOGETHER = 8  # merges of one reading


class Default(Study):
    """The parts and the constants of `auto`."""

    name = "default"
    parts = (*_WITH_INPUTS, *_ALONE)
    about = (
        "What every part of the default method is worth, with the base's inputs and by weights alone, and "
        "how much each of its constants matters: 0.1 (twice), 0.01, 2, 0.01 and 0.15 (⅓ by weights alone), "
        "the exponents ½ and ¾ between which q lies, the powers of N and of 1 − η, ω's 0.0001, and by "
        "weights alone ψ's 0.0001 and how much of C₀ the updates tell. One thing is changed at a time "
        "(docs/auto.md has the equation)."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        """See `Study.run`."""
        return findings(bench, variants, self._models, self.draw, statistics=[BASE])

    def merges(self) -> list[Merge]:
        """Return those that are asked for, on the base's inputs first."""
        known = [_merge(title, given) for title, given in _WITH_INPUTS.items()]
        alone = [
            replace(_merge(title, given), section=Section.DATA_FREE, statistics=None)
            for title, given in _ALONE.items()
        ]
        # Beside what is changed stands what is not.
        wanted = {*(self.only or self.parts)}
        for unchanged, parts in (("auto", _WITH_INPUTS), ("auto" + ALONE, _ALONE)):
            if wanted & parts.keys():
                wanted.add(unchanged)
        return [merge for merge in (*known, *alone) if merge.title in wanted]

    def draw(self, group: Group) -> Any:
        """Draw a bar for each."""
        titles = [merge.title for merge in self.merges()]
        return bars(group, titles, "The default method, part by part, constant by constant")

    def _models(self, bench: Bench, experts: Experts) -> list[Model]:
        with rule.registered():
            parts = [
                some[start : start + _TOGETHER]
                for some in merging.passes(self.merges())
                for start in range(0, len(some), _TOGETHER)
            ]
        jobs: dict[str, Job[list[Model]]] = {
            f"merging, part {number}": partial(_merge_together, experts, part, f"part-{number}")
            for number, part in enumerate(parts, start=1)
        }
        jobs[TUNED] = partial(merging.tuned_task_arithmetic, experts)
        found = bench.work(f"{experts.variant}: merging {len(experts.folders)} experts", jobs)
        return [model for models in found.values() for model in models]


class DefaultMixed(Default):
    """The same where experts are of both kinds."""

    name = "default-mixed"
    about = (
        f"{Default.about} Here every other expert is of the other kind: η is next to nothing where all use "
        "equally many directions, and only seen where they do not."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        """See `Study.run`."""

        def mixed(bench: Bench, experts: Experts) -> Experts:
            return changed_experts(bench, experts, MIXED, experts.work / "mixed")

        return findings(
            bench,
            variants,
            self._models,
            self.draw,
            statistics=[BASE],
            change=mixed,
            remark=", every other one of the other kind",
        )


def _merge(title: str, given: Mapping[str, Any]) -> Merge:
    return Merge(rule.NAME, given, Section.OWN_INPUTS, title, BASE)


def _merge_together(
    experts: Experts, merges: Sequence[Merge], folder: str, on_progress: OnProgress
) -> list[Model]:
    with rule.registered():
        return merging.merge_together(experts, merges, folder, on_progress)
