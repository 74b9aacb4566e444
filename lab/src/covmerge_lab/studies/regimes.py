"""The default beside the known methods where experts are few, many, unlike, long, short, or no experts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from covmerge_lab import merging
from covmerge_lab.bench import EXPERTS, Bench, Outcome, bounds
from covmerge_lab.merging import TUNED, Experts
from covmerge_lab.models import Merge
from covmerge_lab.studies.altered import lengthened, random_like
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Kind, Variant
from covmerge_lab.summary import Group, Row, difference, summarise
from covmerge_lab.training import RANK
from covmerge_lab.workers import Job

# Its annotations are partial.
_plt: Any = plt

LONG = 5.0  # times as long as it was trained
OFTEN = 10.0  # times as many steps
RANKS = (4, 16, 64)
_LISTED = f"{', '.join(map(str, RANKS[:-1]))} and {RANKS[-1]}"
AUTO = "auto"
AVERAGE = "average"
# What led without data and untuned on one of the suites, and what everybody knows.
KNOWN = ("average", "task_arithmetic", "ties", "cart", "tsv_m", "iso_c", "ace", "aswudi")
FOR_ADAPTERS = ("core_space", "knots")

Folders = Mapping[str, Path]


@dataclass(frozen=True)
class Regime:
    """Experts of one kind, changed.

    Attributes:
        name: what the table calls it.
        make: gives the experts by name, of the bench, those that were trained and a folder to write in;
            those with the name of a task are scored.
        kind: of the experts that it is of; None for both.
    """

    name: str
    make: Callable[[Bench, Experts, Path], Folders]
    kind: Kind | None = None


def _first(count: int) -> Callable[[Bench, Experts, Path], Folders]:
    return lambda bench, experts, out: dict(list(experts.folders.items())[:count])


def _trained(bench: Bench, experts: Experts, tasks: Sequence[str], **otherwise: Any) -> Folders:
    """Train some tasks' experts in another way."""
    variant = replace(experts.variant, **otherwise)
    bench.train(variant, tasks)
    return {task: bench.suite.expert(task, variant) for task in tasks}


def _again(bench: Bench, experts: Experts, tasks: Sequence[str]) -> Folders:
    again = _trained(bench, experts, tasks, seed=experts.variant.seed + 1)
    return {**experts.folders, **{f"{task}-again": folder for task, folder in again.items()}}


def _one_twice(bench: Bench, experts: Experts, _: Path) -> Folders:
    return _again(bench, experts, list(experts.folders)[:1])


def _all_twice(bench: Bench, experts: Experts, _: Path) -> Folders:
    return _again(bench, experts, list(experts.folders))


def _mixed(bench: Bench, experts: Experts, _: Path) -> Folders:
    """Every other expert is of the other kind."""
    other: Kind = "lora" if experts.variant.kind == "full" else "full"
    tasks = list(experts.folders)[1::2]
    return {**experts.folders, **_trained(bench, experts, tasks, kind=other)}


def _by_sgd(bench: Bench, experts: Experts, _: Path) -> Folders:
    """Every other expert is trained by SGD."""
    tasks = list(experts.folders)[1::2]
    return {**experts.folders, **_trained(bench, experts, tasks, optimizer="sgd")}


def _ranks(*ranks: int) -> Callable[[Bench, Experts, Path], Folders]:
    """Give adapters of these ranks in turns."""

    def make(bench: Bench, experts: Experts, out: Path) -> Folders:
        tasks = list(experts.folders)
        found = [
            _trained(bench, experts, tasks[place :: len(ranks)], rank=rank)
            for place, rank in enumerate(ranks)
        ]
        return {task: found[place % len(ranks)][task] for place, task in enumerate(tasks)}

    return make


def _one_start(bench: Bench, experts: Experts, _: Path) -> Folders:
    return _trained(bench, experts, list(experts.folders), one_start=True)


def _frozen(bench: Bench, experts: Experts, _: Path) -> Folders:
    """Leave the embeddings of words or patches as they are."""
    return _trained(bench, experts, list(experts.folders), frozen=True)


def _one_trained(times: float) -> Callable[[Bench, Experts, Path], Folders]:
    """Train the last task's expert for other numbers of steps."""

    def make(bench: Bench, experts: Experts, out: Path) -> Folders:
        tasks = list(experts.folders)[-1:]
        return {**experts.folders, **_trained(bench, experts, tasks, times=times)}

    return make


def _one_times(times: float) -> Callable[[Bench, Experts, Path], Folders]:
    def make(bench: Bench, experts: Experts, out: Path) -> Folders:
        task = next(iter(experts.folders))
        changed = lengthened(experts.folders[task], bench.suite.base, out / task, times=times)
        return {**experts.folders, task: changed}

    return make


def _one_random(bench: Bench, experts: Experts, out: Path) -> Folders:
    like = next(iter(experts.folders.values()))
    return {**experts.folders, "random": random_like(like, bench.suite.base, out / "random")}


MIXED = Regime("full and adapters in turns", _mixed)
REGIMES = (
    Regime("2 experts", _first(2)),
    Regime("4 experts", _first(4)),
    Regime("all experts", _first(99)),
    Regime("one task trained twice", _one_twice),
    Regime("all tasks trained twice", _all_twice),
    MIXED,
    *(Regime(f"adapters of rank {rank}", _ranks(rank), "lora") for rank in RANKS if rank != RANK),
    Regime(f"adapters of ranks {_LISTED} in turns", _ranks(*RANKS), "lora"),
    Regime("adapters that began alike", _one_start, "lora"),
    Regime("SGD and AdamW in turns", _by_sgd, "full"),
    Regime("embeddings frozen", _frozen, "full"),
    Regime(f"one trained {OFTEN:g} times as long", _one_trained(OFTEN)),
    Regime(f"one trained {1 / OFTEN:g} times as long", _one_trained(1 / OFTEN)),
    Regime(f"one update {LONG:g} times as long", _one_times(LONG)),
    Regime(f"one update {1 / LONG:g} times as long", _one_times(1 / LONG)),
    Regime("one more, its update random", _one_random),
)


class Regimes(Study):
    """Where `auto` breaks, if it does."""

    name = "regimes"
    parts = tuple(regime.name for regime in REGIMES)
    about = (
        "Does the default keep up wherever experts come from: few and many, two of one task, adapters "
        "among full fine-tunes, adapters of other ranks and starts, other optimisers, frozen embeddings, "
        "training much longer or shorter, updates much longer or shorter than the others', and one that is "
        "random? Known methods at their defaults, Task Arithmetic tuned on labels, on the same experts."
    )

    def parts_of(self, kind: Kind) -> Sequence[str]:
        return [regime.name for regime in REGIMES if regime.kind in (None, kind)]

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        numbers: dict[str, Any] = {}
        texts: list[str] = []
        pictures: dict[str, Any] = {}
        for kind in dict.fromkeys(each.kind for each in variants if self._of(each.kind)):
            found: dict[str, list[Outcome]] = {}
            for variant in (each for each in variants if each.kind == kind):
                for name, outcome in _outcomes(bench, variant, self._of(variant.kind)).items():
                    found.setdefault(name, []).append(outcome)
            groups = {name: summarise(outcomes) for name, outcomes in found.items()}
            numbers[kind] = {name: group.as_json() for name, group in groups.items()}
            of_kind = next(iter(groups.values())).title.split(", ", 1)[1]
            texts.append(f"## {of_kind}\n\n{_table(groups, found)}\n\n{_all_of_them(groups)}")
            pictures[f"regimes-{kind}"] = _draw(groups, of_kind)
        return Findings({"kinds": numbers}, "\n\n".join([*texts, _LEGEND]), pictures)

    def _of(self, kind: Kind) -> list[Regime]:
        names = {*(self.only or self.parts)} & {*self.parts_of(kind)}
        return [each for each in REGIMES if each.name in names]


_LEGEND = f"""\
- Mean accuracy in %, over the tasks that have an expert; a random expert has none, and of a task that was \
trained twice the first training's head is used.
- best known: of {", ".join(KNOWN)}; on adapters also {", ".join(FOR_ADAPTERS)}. It is chosen by the \
accuracy shown, which no user has.
- less: `{AUTO}` less the other, on the same examples, with the 95 % interval of the paired bootstrap; \
*: it leaves 0 out."""


def _outcomes(bench: Bench, variant: Variant, regimes: Sequence[Regime]) -> dict[str, Outcome]:
    tasks = tuple(bench.suite.subsets[-1])
    bench.train(variant, tasks)
    with bench.experts(variant, tasks, []) as experts:
        return {
            regime.name: bench.kept(
                f"{variant}-regime-{regime.name}",
                variant,
                partial(_outcome, bench, experts, regime),
            )
            for regime in regimes
        }


def _outcome(bench: Bench, experts: Experts, regime: Regime) -> Outcome:
    work = experts.work / regime.name
    changed = changed_experts(bench, experts, regime, work)
    models = [*bounds(changed), *bench.merge(changed, _merges(changed), tuned=True)]
    scored = bench.score(changed, models, measured=False)
    shutil.rmtree(work)
    return Outcome(experts.variant, changed.tasks, tuple(scored))


def changed_experts(bench: Bench, experts: Experts, regime: Regime, work: Path) -> Experts:
    """Return the experts of a regime, made in a folder of their own."""
    work.mkdir(parents=True)
    folders = regime.make(bench, experts, work / "experts")
    changed = replace(experts, folders=folders, work=work / "merged")
    whole = {t: f for t, f in experts.whole.items() if folders.get(t) == experts.folders[t]}
    jobs: dict[str, Job[Path]] = {}
    for task in changed.tasks:
        folder = folders[task]
        if task not in whole and (folder / "adapter_config.json").exists():
            out = work / "whole" / task
            jobs[task] = partial(merging.make_whole, bench.suite, task, folder, out)
        elif task not in whole:
            whole[task] = folder
    title = f"{experts.variant}, {regime.name}: experts made whole"
    return replace(changed, whole={**whole, **bench.work(title, jobs)})


def _merges(experts: Experts) -> list[Merge]:
    adapters = all((each / "adapter_config.json").exists() for each in experts.folders.values())
    return [
        *(Merge(method) for method in (*KNOWN, *(FOR_ADAPTERS if adapters else ()))),
        Merge(AUTO),
    ]


def _others(group: Group) -> list[Row]:
    """The known methods that nobody tuned, the best first."""
    known = {*KNOWN, *FOR_ADAPTERS}
    return sorted((row for row in group.rows if row.title in known), key=lambda row: -row.mean.mean)


def _table(groups: Mapping[str, Group], outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    def less(name: str, other: str) -> str:
        found = difference(outcomes[name], AUTO, other)
        mark = "*" if found.clear else ""
        return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]{mark}"

    columns = ["experts", "each on its task", AVERAGE, TUNED, "best known", AUTO]
    columns += ["less best known", "less tuned", "less average"]
    rows: list[list[str]] = []
    for name, group in groups.items():
        best = _others(group)[0]
        means = {row.title: f"{100 * row.mean.mean:.1f}" for row in group.rows}
        rows.append(
            [
                name,
                *(means[title] for title in (EXPERTS, AVERAGE, TUNED)),
                f"{means[best.title]} ({best.title})",
                means[AUTO],
                *(less(name, title) for title in (best.title, TUNED, AVERAGE)),
            ]
        )
    return markdown(columns, rows)


def _all_of_them(groups: Mapping[str, Group]) -> str:
    titles = list(dict.fromkeys(row.title for group in groups.values() for row in group.rows))
    means = [{row.title: row.mean.mean for row in group.rows} for group in groups.values()]
    rows = [[t, *(f"{100 * of[t]:.1f}" if t in of else "" for of in means)] for t in titles]
    return markdown(["method", *groups], rows)


def _draw(groups: Mapping[str, Group], of_kind: str) -> Any:
    figure, axes = _plt.subplots(figsize=(7.5, 0.5 * len(groups) + 1.8), layout="constrained")
    shown = {
        AUTO: ("D", "#1f5fa8"),
        TUNED: ("|", "#b3541e"),
        AVERAGE: ("x", "#767676"),
    }
    for place, group in enumerate(reversed(list(groups.values()))):
        bound = group.row(EXPERTS).mean.mean or nan  # of experts that get nothing right
        others = [100 * row.mean.mean / bound for row in _others(group)]
        axes.plot(others, [place] * len(others), "o", color="#bbbbbb", ms=4)
        for title, (mark, colour) in shown.items():
            axes.plot(100 * group.row(title).mean.mean / bound, place, mark, color=colour, ms=8)
    axes.set_yticks(range(len(groups)), list(reversed(list(groups))))
    axes.set_xlabel("mean accuracy, % of that of the experts themselves")
    axes.set_title(f"auto beside the known methods, regime by regime\n{of_kind}", fontsize=10)
    handles = [
        _plt.Line2D([], [], marker=mark, color=colour, ls="", label=title)
        for title, (mark, colour) in shown.items()
    ]
    handles.append(_plt.Line2D([], [], marker="o", color="#bbbbbb", ls="", label="known methods"))
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
