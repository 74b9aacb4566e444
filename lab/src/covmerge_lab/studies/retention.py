"""Does the retention that is predicted without data say what is measured with it?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

import covmerge
from covmerge.maths.measures.retention import overall
from covmerge.run.inspection.result import LayerView
from covmerge_lab.bench import EXPERTS, Bench, Scored, bounds
from covmerge_lab.merging import Experts, catalogue
from covmerge_lab.models import Model, Section
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Variant
from covmerge_lab.workers import MergeSteps, OnProgress

# Its annotations are partial.
_plt: Any = plt

WEIGHTS = {"kept": "Ĉ = ΔᵀΔ", "unweighted": "Ĉ = I", "along": "along the update"}

# Methods that minimise what the prediction sums up, so that it is near 1 for them by construction:
# as a measure it is spent on them.
SPENT = ("actmat", "wudi")
_COLOURS = {False: "#1f5fa8", True: "#b3541e"}


@dataclass(frozen=True)
class Pair:
    """What was predicted and measured of one expert in one merged model.

    Attributes:
        kept: predicted with Ĉ_t = Δ_tᵀΔ_t, over all matrices.
        unweighted: the same with Ĉ_t = I, which knows nothing of inputs.
        along: predicted along the expert's own update, `covmerge.maths.measures.retention`.
        measured: accuracy over the expert's own.
    """

    model: str
    task: str
    kept: float
    unweighted: float
    along: float
    measured: float


@dataclass(frozen=True)
class Agreement:
    """Spearman's rank correlations between a prediction and what was measured.

    Attributes:
        methods: over the methods, for each task; their mean. Which method serves this task best?
        tasks: over the tasks, for each method; their mean. Which expert pays most?
        means: over the methods, of means over the tasks. Which method is best?
    """

    methods: float
    tasks: float
    means: float


class Retention(Study):
    """covmerge's own prediction."""

    name = "retention"
    about = (
        "Whether the retention that `covmerge compare` and `covmerge report` predict without data, "
        "1 − Tr[(W̄−Δ)Ĉ(W̄−Δ)ᵀ]/Tr[ΔĈΔᵀ] with Ĉ = ΔᵀΔ, agrees with measured accuracy: rank "
        "correlations, beside the same prediction with Ĉ = I, which knows nothing of the inputs, and "
        "beside what is kept along the expert's own update, 1 − (1 − ⟨W̄,Δ⟩/‖Δ‖²)²."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        numbers: dict[str, Any] = {}
        texts: list[str] = []
        pictures: dict[str, Any] = {}
        for kind in dict.fromkeys(variant.kind for variant in variants):
            pairs = average([_pairs(bench, v) for v in variants if v.kind == kind])
            seeds = sum(variant.kind == kind for variant in variants)
            found = {
                name: {weight: agreement(some, weight) for weight in WEIGHTS}
                for name, some in (
                    ("all methods", pairs),
                    ("without actmat and wudi", without(pairs, SPENT)),
                )
            }
            numbers[kind] = {
                "pairs": [asdict(pair) for pair in pairs],
                "agreement": {
                    name: {weight: asdict(value) for weight, value in of.items()}
                    for name, of in found.items()
                },
            }
            title = f"{bench.suite.name}, {kind}, {seeds} seed" + ("s" if seeds > 1 else "")
            texts.append(f"## {title}\n\n{text(pairs, found)}")
            pictures[f"retention-{kind}"] = _draw(title, pairs)
        return Findings({"kinds": numbers}, "\n\n".join(texts), pictures)


def _pairs(bench: Bench, variant: Variant) -> list[Pair]:
    """Merge by every method that needs no data, predict, and measure."""
    tasks = tuple(bench.suite.subsets[-1])
    bench.train(variant, tasks)
    merges = [merge for merge in catalogue(variant.kind) if merge.section is Section.DATA_FREE]
    with bench.experts(variant, tasks) as experts:
        models = bench.merge(experts, merges)
        jobs = {model.title: partial(predict, experts, model) for model in models}
        predicted = bench.work(f"{variant}: predicting", jobs)
        scored = bench.score(experts, [*bounds(experts), *models], measured=False)
    own = _accuracies(scored, EXPERTS)
    return [
        Pair(model.title, task, *predicted[model.title][task], accuracy / (own[task] or nan))
        for model in models
        for task, accuracy in _accuracies(scored, model.title).items()
    ]


def predict(
    experts: Experts, model: Model, on_progress: OnProgress
) -> dict[str, tuple[float, float, float]]:
    """Return by task what a merged model on the disk keeps: by the inputs, without, along the update."""
    (folder,) = set(model.folders.values())
    seen = inspect_merged(experts.suite.base, experts.folders, folder, on_progress)
    return {
        task: (
            overall(layer.retention[task] for layer in seen) or 0.0,
            # As it is: cut off at 0 it would be 0 nearly everywhere.
            fmean(unweighted(layer, task) for layer in seen if layer.norms[task]),
            overall(layer.along.get(task) for layer in seen) or 0.0,
        )
        for task in experts.folders
    }


def inspect_merged(
    base: Path, experts: Mapping[str, Path], folder: Path, on_progress: OnProgress
) -> tuple[LayerView, ...]:
    """Hold a merged model against the experts that it was made of, without singular values."""
    report = covmerge.report(folder, spectra="none", progress=MergeSteps(on_progress))
    assert set(report.inspection.experts) == set(experts), f"{folder} is of other experts"
    assert report.inspection.base == str(base), f"{folder} is of another base"
    return report.inspection.matrices


def unweighted(layer: LayerView, expert: str) -> float:
    """1 − ‖W̄ − Δ‖²/‖Δ‖²: what is kept where all inputs matter alike."""
    size, merged = layer.norms[expert], layer.merged_norm or 0.0
    return 2 * layer.merged_cosines[expert] * merged / size - (merged / size) ** 2


def average(seeds: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Average what several seeds say of the same models and tasks."""
    return [
        Pair(
            same[0].model,
            same[0].task,
            fmean(pair.kept for pair in same),
            fmean(pair.unweighted for pair in same),
            fmean(pair.along for pair in same),
            fmean(pair.measured for pair in same),
        )
        for same in zip(*seeds, strict=True)
    ]


def without(pairs: Sequence[Pair], models: Collection[str]) -> list[Pair]:
    """Leave out some models."""
    return [pair for pair in pairs if pair.model not in models]


def agreement(pairs: Sequence[Pair], weight: str) -> Agreement:
    """Correlate a prediction with what was measured."""
    models, tasks = (
        list(dict.fromkeys(getattr(p, key) for p in pairs)) for key in ("model", "task")
    )
    predicted = {(p.model, p.task): float(getattr(p, weight)) for p in pairs}
    measured = {(p.model, p.task): p.measured for p in pairs}

    def correlation(places: Sequence[tuple[str, str]]) -> float:
        return spearman([predicted[p] for p in places], [measured[p] for p in places])

    return Agreement(
        fmean(correlation([(m, t) for m in models]) for t in tasks),
        fmean(correlation([(m, t) for t in tasks]) for m in models),
        spearman(
            [fmean(predicted[m, t] for t in tasks) for m in models],
            [fmean(measured[m, t] for t in tasks) for m in models],
        ),
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of ranks, equal values sharing theirs; 0 where all are equal.

    Example:
        >>> round(spearman([1, 2, 3], [10, 30, 20]), 3), spearman([1, 1], [1, 2])
        (0.5, 0.0)
    """
    a, b = _centred_ranks(one), _centred_ranks(other)
    size = sum(x * x for x in a) * sum(y * y for y in b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / size**0.5 if size else 0.0


def _centred_ranks(values: Sequence[float]) -> list[float]:
    ranks = [
        sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values
    ]
    mean = fmean(ranks)
    return [rank - mean for rank in ranks]


def _accuracies(scored: Sequence[Scored], title: str) -> dict[str, float]:
    (found,) = (each for each in scored if each.model.title == title)
    return {task: fmean(scores) for task, scores in found.scores.items()}


def text(pairs: Sequence[Pair], found: Mapping[str, Mapping[str, Agreement]]) -> str:
    """Say what came out, and give the tables."""
    columns = [
        "rank correlation with measured accuracy",
        "which method, for a task",
        "which method",
    ]
    correlations = markdown(
        [*columns, "which task pays, for a method"],
        [
            [
                f"{WEIGHTS[weight]}, {name}",
                f"{value.methods:+.2f}",
                f"{value.means:+.2f}",
                f"{value.tasks:+.2f}",
            ]
            for name, of in found.items()
            for weight, value in of.items()
        ],
    )
    models = dict.fromkeys(pair.model for pair in pairs)
    rows = [(model, [p for p in pairs if p.model == model]) for model in models]
    rows.sort(key=lambda row: -fmean(p.measured for p in row[1]))
    table = markdown(
        [
            *("method", "measured / expert", "predicted, mean", "least"),
            *("predicted with Ĉ = I, mean", "along the update, mean", "least"),
        ],
        [
            [
                model,
                f"{fmean(p.measured for p in own):.2f}",
                f"{fmean(p.kept for p in own):+.2f}",
                f"{min(p.kept for p in own):+.2f}",
                f"{fmean(p.unweighted for p in own):+.2f}",
                f"{fmean(p.along for p in own):+.2f}",
                f"{min(p.along for p in own):+.2f}",
            ]
            for model, own in rows
        ],
    )
    return (
        f"{correlations}\n\n`actmat` and `wudi` minimise what is predicted with Ĉ = ΔᵀΔ, so that it is "
        f"near 1 for them whatever they are worth.\n\n{table}"
    )


def _draw(title: str, pairs: Sequence[Pair]) -> Any:
    figure, panels = _plt.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    for axes, (weight, name) in zip(panels, WEIGHTS.items(), strict=True):
        for circular in (False, True):
            own = [p for p in pairs if (p.model in SPENT) == circular]
            axes.plot(
                [getattr(p, weight) for p in own],
                [p.measured for p in own],
                "x" if circular else "o",
                ms=4,
                alpha=0.7,
                color=_COLOURS[circular],
                label=" and ".join(SPENT) if circular else "all other methods",
            )
        found = agreement(without(pairs, SPENT), weight).methods
        axes.set_title(f"{name}: rank correlation over methods {found:+.2f}", fontsize=9)
        if weight == "unweighted":  # far below 0 for a merged update of a larger norm
            axes.set_xscale("symlog", linthresh=1.0)
        axes.set_xlabel("predicted retention")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("measured accuracy / expert's")
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"Predicted without data, measured with it: {title}", fontsize=10)
    return figure
