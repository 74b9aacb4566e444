"""Studies of what a setting does to accuracy: merges of the same experts, side by side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt

from covmerge_lab import report
from covmerge_lab.bench import Bench, Outcome, bounds
from covmerge_lab.merging import TUNED, Experts
from covmerge_lab.models import Merge, Model
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.suite import Variant
from covmerge_lab.summary import Group, summarise

# Its annotations are partial.
_plt: Any = plt

EPSILONS = tuple(10.0**power for power in range(-7, 0))
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)


class AccuracyStudy(Study):
    """Merges that differ in one thing each, put to the test of every task."""

    @abstractmethod
    def merges(self) -> Sequence[Merge]:
        """Return what stands side by side."""

    @abstractmethod
    def draw(self, group: Group) -> Any:
        """Return the picture of one kind of experts."""

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        return findings(bench, variants, self._models, self.draw)

    def _models(self, bench: Bench, experts: Experts) -> list[Model]:
        return bench.merge(experts, self.merges(), tuned=True)


def findings(
    bench: Bench,
    variants: Sequence[Variant],
    make: Callable[[Bench, Experts], list[Model]],
    draw: Callable[[Group], Any],
    statistics: Sequence[str] = (),
    change: Callable[[Bench, Experts], Experts] = lambda bench, experts: experts,
    remark: str = "",
) -> Findings:
    """Put the models that are made of the experts to the test, one table for each kind of experts.

    Args:
        bench: of the suite.
        variants: kinds and seeds of the experts.
        make: gives the merged models.
        draw: gives the picture of a table.
        statistics: kinds of statistics that `make` needs.
        change: gives other experts in the place of those that were trained.
        remark: what is then to be said of them beside their kind.
    """
    groups: list[Group] = []
    for kind in dict.fromkeys(variant.kind for variant in variants):
        outcomes: list[Outcome] = []
        for variant in (each for each in variants if each.kind == kind):
            tasks = tuple(bench.suite.subsets[-1])
            bench.train(variant, tasks)
            with bench.experts(variant, tasks, statistics) as trained:
                experts = change(bench, trained)
                models = [*bounds(experts), *make(bench, experts)]
                scored = bench.score(experts, models, measured=False)
            outcomes.append(Outcome(variant, tasks, tuple(scored)))
        groups.append(replace(summarise(outcomes), remark=remark))
    return Findings(
        {"groups": [group.as_json() for group in groups]},
        "\n\n".join(f"## {group.title}\n\n{report.markdown(group)}" for group in groups),
        {f"accuracy-{group.kind}": draw(group) for group in groups},
    )


class Ablation(AccuracyStudy):
    """ACE's Table 4."""

    name = "ablation"
    about = (
        "What each part of ACE is worth (ACE, Table 4): E1 the basic closed form, E2 with adaptive "
        "normalisation, E3 with the collective prior, E4 with spectral refinement."
    )

    def merges(self) -> Sequence[Merge]:
        """Return E1 to E4."""
        return (
            Merge("ace", {"normalize": False, "prior": False}, label="E1 basic closed form"),
            Merge("ace", {"prior": False, "refine": False}, label="E2 + normalisation"),
            Merge("ace", {"refine": False}, label="E3 + collective prior"),
            Merge("ace", label="E4 + spectral refinement"),
        )

    def draw(self, group: Group) -> Any:
        """Draw a bar for each step."""
        return bars(group, [merge.title for merge in self.merges()], "ACE, part by part")


class Sensitivity(AccuracyStudy):
    """ACE's Table 5."""

    name = "sensitivity"
    about = (
        "How much ACE depends on its two fixed numbers (ACE, Table 5): the gate's threshold τ at "
        "k_frac 0.3, and the share k_frac of refined directions at τ 0.3."
    )

    def merges(self) -> Sequence[Merge]:
        """Return one merge for each value."""
        return (
            *(Merge("ace", {"tau": value}) for value in THRESHOLDS),
            *(Merge("ace", {"k_frac": value}) for value in SHARES),
        )

    def draw(self, group: Group) -> Any:
        """Draw two lines."""
        figure, axes = _plt.subplots(figsize=(6.5, 3.6), layout="constrained")
        for name, values in (("tau", THRESHOLDS), ("k_frac", SHARES)):
            line(axes, group, values, lambda value, name=name: f"ace {name}={value}", name)
        axes.set_xlabel("value of tau (k_frac 0.3) or of k_frac (tau 0.3)")
        return _finish(
            figure, axes, group, "Accuracy of ACE over its threshold and its refined share"
        )


class Ridge(AccuracyStudy):
    """ACE's ε, which the paper sets per model family."""

    name = "ridge"
    about = (
        "How much ACE depends on its ridge ε, over six decades: the paper uses 4e-2 for GPT-2, 2e-4 for "
        "RoBERTa-base and 1e-5 elsewhere, its released code 1e-2 everywhere."
    )

    def merges(self) -> Sequence[Merge]:
        """Return one merge for each ε."""
        return tuple(Merge("ace", {"eps": value}) for value in EPSILONS)

    def draw(self, group: Group) -> Any:
        """Draw a line over a logarithmic axis."""
        figure, axes = _plt.subplots(figsize=(6.5, 3.6), layout="constrained")
        line(axes, group, EPSILONS, lambda value: f"ace eps={value}", "ace")
        axes.set_xscale("log")
        axes.set_xlabel("ridge ε, in squared units of the updates")
        return _finish(figure, axes, group, "Accuracy of ACE over its ridge")


def bars(group: Group, titles: Sequence[str], title: str) -> Any:
    """Draw the mean accuracy of some rows, with intervals and seeds."""
    figure, axes = _plt.subplots(figsize=(6.5, 0.4 * len(titles) + 1.5), layout="constrained")
    for place, name in enumerate(reversed(titles)):
        row = group.row(name)
        mean, low, high = (100 * value for value in (row.mean.mean, row.mean.low, row.mean.high))
        axes.barh(place, mean, color="#1f5fa8", alpha=0.75)
        axes.errorbar(mean, place, xerr=[[mean - low], [high - mean]], color="black", capsize=2)
        axes.plot([100 * seed for seed in row.seeds], [place] * len(row.seeds), "k.", ms=4)
        axes.text(high + 0.8, place, f"{mean:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(titles)), list(reversed(titles)))
    return _finish(figure, axes, group, title, across=True)


def line(
    axes: Any, group: Group, values: Sequence[float], title: Callable[[float], str], label: str
) -> None:
    """Draw the mean accuracy over a parameter, its interval as a band."""
    rows = [group.row(title(value)) for value in values]
    (drawn,) = axes.plot(values, [100 * row.mean.mean for row in rows], "o-", label=label)
    axes.fill_between(
        values,
        [100 * row.mean.low for row in rows],
        [100 * row.mean.high for row in rows],
        color=drawn.get_color(),
        alpha=0.15,
    )


def _finish(figure: Any, axes: Any, group: Group, title: str, *, across: bool = False) -> Any:
    """Add what every picture has: tuned Task Arithmetic, title, unit."""
    reference = 100 * group.row(TUNED).mean.mean
    draw = axes.axvline if across else axes.axhline
    draw(reference, color="#b3541e", ls="--", lw=1, label="Task Arithmetic, tuned on labels")
    unit = "mean accuracy, %; 95 % intervals"
    (axes.set_xlabel if across else axes.set_ylabel)(unit)
    axes.set_title(f"{title}\n{group.title}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
