"""The default, which nobody tunes, beside every method that labels have tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from covmerge_lab import merging, report
from covmerge_lab.bench import Bench, Outcome, bounds
from covmerge_lab.merging import SCALES, Experts
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.studies.accuracy import bars
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.suite import Kind, Variant
from covmerge_lab.summary import Group, difference, summarise
from covmerge_lab.workers import Job

Grid = Sequence[Mapping[str, Any]]


def _over(name: str, *values: float) -> Grid:
    return [{name: value} for value in values]


_AROUND = (0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)  # of scales whose default is 1
_LONGER = (*_AROUND[1:], 2.5, 3.0, 4.0)  # of flat spectra, which labels lengthen
GRIDS: Mapping[str, Grid] = {
    "task_arithmetic": _over("scale", *SCALES),
    "ties": [{"density": d, **s} for d in (0.1, 0.2, 0.4) for s in _over("scale", *_AROUND)],
    "cart": [
        {"rank_ratio": share, **scale}
        for share in (0.04, 0.12, 0.32)
        for scale in _over("scale", 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
    ],
    "tsv_m": _over("scale", 0.2, *_AROUND),
    "iso_c": _over("scale", *_LONGER),
    "actmat": _over("rtol", 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 0.5),
    "ace": _over("eps", *(10.0**power for power in range(-7, 2))),
    "aswudi": _over("scale", *_AROUND[1:-1]),  # it takes longest
}
FOR_ADAPTERS: Mapping[str, Grid] = {  # of full fine-tunes Consensus was nowhere near the first
    "consensus": _over("scale", 0.1, 0.2, 0.3, 0.4, 0.5, 0.7),
    "core_space": _over("scale", *_LONGER),
    "knots": _over("scale", *_AROUND),
}
AUTO = (Merge("auto"),)


class Tuned(Study):
    """`auto` beside the best of every other method."""

    name = "tuned"
    parts = (*GRIDS, *FOR_ADAPTERS)
    about = (
        "Does the default, with nothing tuned, keep up with methods whose parameters labels have chosen? "
        "Each is tuned over a grid on the validation examples of all tasks that are merged."
    )

    def parts_of(self, kind: Kind) -> Sequence[str]:
        return tuple(grids(kind))

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        numbers: list[Any] = []
        texts: list[str] = []
        pictures: dict[str, Any] = {}
        of_kinds = {v.kind: tried for v in variants if (tried := self._of(v.kind))}
        for (kind, tried), tasks in product(of_kinds.items(), bench.suite.subsets):
            outcomes = [_outcome(bench, v, tasks, tried) for v in variants if v.kind == kind]
            group = summarise(outcomes)
            beyond = {
                own.title: {
                    row.title: difference(outcomes, own.title, row.title)
                    for row in group.rows
                    if row.section is Section.TUNED
                }
                for own in AUTO
            }
            numbers.append(
                {
                    **group.as_json(),
                    "beyond": {
                        own: {t: vars(i) for t, i in of.items()} for own, of in beyond.items()
                    },
                }
            )
            texts.append(
                f"## {group.title}\n\n{report.markdown(group)}\n\n{_said(group, beyond, tried)}"
            )
            titles = [row.title for row in group.rows if row.section is not Section.BOUNDS]
            pictures[f"accuracy-{kind}-{len(tasks)}"] = bars(
                group, titles, "auto beside tuned methods"
            )
        return Findings({"groups": numbers}, "\n\n".join(texts), pictures)

    def _of(self, kind: Kind) -> Mapping[str, Grid]:
        """Return what is tuned: Task Arithmetic always, as all tables have it."""
        found = grids(kind)
        if not self.only:
            return found
        asked = {*self.only} & {*found}
        return {m: g for m, g in found.items() if asked and m in {*asked, "task_arithmetic"}}


def grids(kind: Kind) -> Mapping[str, Grid]:
    """Return what is tuned over what."""
    return {**GRIDS, **FOR_ADAPTERS} if kind == "lora" else GRIDS


def _outcome(
    bench: Bench, variant: Variant, tasks: Sequence[str], tried: Mapping[str, Grid]
) -> Outcome:
    bench.train(variant, tasks)
    with bench.experts(variant, tasks, []) as experts:
        models = [*bounds(experts), *bench.merge(experts, AUTO), *_tuned(bench, experts, tried)]
        return Outcome(variant, tuple(tasks), tuple(bench.score(experts, models, measured=False)))


def _tuned(bench: Bench, experts: Experts, tried: Mapping[str, Grid]) -> list[Model]:
    jobs: dict[str, Job[Model]] = {
        method: partial(merging.tuned, experts, method, grid[::3] if bench.suite.quick else grid)
        for method, grid in tried.items()
    }
    return list(bench.work(f"{experts.variant}: tuning {len(jobs)} methods", jobs).values())


def _said(group: Group, beyond: Mapping[str, Mapping[str, Any]], tried: Mapping[str, Grid]) -> str:
    lines = [
        f"- {row.title}: " + "; ".join(_chosen(each, tried[row.method]) for each in row.parameters)
        for row in group.rows
        if row.section is Section.TUNED and row.method
    ]
    best = next(row for row in group.rows if row.section is Section.TUNED)
    for own, of in beyond.items():
        found = of[best.title]
        lines.append(
            f"- {own} less the best of the tuned, {best.title}: {100 * found.mean:+.1f} "
            f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        )
    return "\n".join(lines)


def _chosen(parameters: Mapping[str, Any], grid: Grid) -> str:
    """Say what was chosen, and where the grid ends there: beyond it may be better still."""
    found: list[str] = []
    for name, value in parameters.items():
        tried = {each[name] for each in grid}
        ends = {min(tried): " (the least tried)", max(tried): " (the most tried)"}
        end = ends.get(value, "") if len(tried) > 1 else ""
        found.append(f"{name} {value:g}{end}")
    return ", ".join(found)
