"""How differently the experts' updates are scaled, and what ACE's gate makes of it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from math import comb
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import matplotlib.pyplot as plt

import covmerge
from covmerge.maths.covariance.estimate import DEFAULT_TAU, Statistic, gate
from covmerge.run.judgement.layers import by_depth
from covmerge_lab.bench import Bench
from covmerge_lab.studies.layers import METHOD, short, train
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Variant
from covmerge_lab.workers import MergeSteps, OnProgress

# Its annotations are partial.
_plt: Any = plt

SUBSETS = 20  # of each number of experts, at most
SEED = 0
STATISTICS: tuple[Statistic, ...] = ("paper", "scale_free")
_COLOURS = {"paper": "#1f5fa8", "scale_free": "#b3541e"}
_LABELS = {
    "paper": f"γ of the paper, τ = {DEFAULT_TAU['paper']}",
    "scale_free": f"scale-free γ, τ = {DEFAULT_TAU['scale_free']}",
}

Norms = Mapping[str, Mapping[str, float]]  # ‖Δ_t‖ by layer, by expert


@dataclass(frozen=True)
class Point:
    """What the gate says of some experts, mean over subsets of them.

    Attributes:
        experts: how many.
        subsets: how many choices of them.
        gamma: median over the layers.
        fired: share of the layers.
    """

    experts: int
    subsets: int
    gamma: float
    fired: float


class Heterogeneity(Study):
    """ACE's Figures 1 and 4 to 7."""

    name = "heterogeneity"
    about = (
        "How differently scaled are the experts' updates, layer by layer, and does it grow with the number "
        "of experts (ACE, Figures 1 and 4-7)? γ of the paper, Var[log‖Δ‖²] / E[log‖Δ‖²]², which depends on "
        "the unit of the weights, and beside it Var[log‖Δ‖²], which does not."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        numbers: dict[str, Any] = {}
        texts: list[str] = []
        pictures: dict[str, Any] = {}
        for variant in variants:
            folders = train(bench, variant)
            job = partial(update_norms, bench.suite.base, folders)
            (norms,) = bench.work(
                f"{variant}: statistics of a merge by ACE", {METHOD: job}
            ).values()
            growth = {s: growth_of(norms, s) for s in STATISTICS}
            numbers[str(variant)] = {
                "layers": {
                    name: {
                        "update_norm": of,
                        **{
                            s: gate(list(of.values()), tau=None, statistic=s).gamma
                            for s in STATISTICS
                        },
                    }
                    for name, of in norms.items()
                },
                "growth": {s: [asdict(point) for point in of] for s, of in growth.items()},
            }
            texts.append(f"## {variant}\n\n{text(norms, growth)}")
            pictures[f"gamma-{variant}"] = _draw(str(variant), norms, growth)
        return Findings({"variants": numbers}, "\n\n".join(texts), pictures)


def update_norms(base: Path, experts: Mapping[str, Path], on_progress: OnProgress) -> Norms:
    """Return ‖Δ_t‖ of every layer that ACE merges, as the merge itself reports them.

    A tensor of several matrices, such as q, k and v in one, is reported as one and left out.
    """
    stats: Any = covmerge.merge(
        base, experts, method=METHOD, progress=MergeSteps(on_progress)
    ).stats
    found: dict[str, Mapping[str, float]] = {}
    for name in by_depth(stats["tensors"]):
        entry = stats["tensors"][name]
        seen = [matrix for matrix in entry.get("matrices", ()) if "gamma" in matrix]
        if len(seen) == 1:
            norms = cast("Mapping[str, float]", entry["update_norm"])
            found[name] = {expert: norm for expert, norm in norms.items() if norm}
    return found


def growth_of(norms: Norms, statistic: Statistic) -> list[Point]:
    """Return what the gate says of 2 experts, 3 and so on up to all, over seeded subsets."""
    experts = list(dict.fromkeys(expert for of in norms.values() for expert in of))
    points: list[Point] = []
    for count in range(2, len(experts) + 1):
        subsets = choose(experts, count)
        gates = [
            [
                gate([of[e] for e in subset if e in of], tau=None, statistic=statistic)
                for of in norms.values()
            ]
            for subset in subsets
        ]
        gamma = fmean(median(found.gamma for found in layers) for layers in gates)
        fired = fmean(fmean(found.fired for found in layers) for layers in gates)
        points.append(Point(count, len(subsets), gamma, fired))
    return points


def choose(experts: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Return all subsets of a size, or `SUBSETS` of them, always the same ones.

    Example:
        >>> choose(["a", "b", "c"], 2)
        [('a', 'b'), ('a', 'c'), ('b', 'c')]
    """
    if comb(len(experts), count) <= SUBSETS:
        return list(combinations(experts, count))
    return random.Random(SEED).sample(list(combinations(experts, count)), SUBSETS)


def text(norms: Norms, growth: Mapping[str, Sequence[Point]]) -> str:
    """Say what came out, and give the table."""
    ratios = [max(of.values()) / min(of.values()) for of in norms.values()]
    fires = {s: round(points[-1].fired * len(norms)) for s, points in growth.items()}
    largest = max(norm for of in norms.values() for norm in of.values())
    said = f"""\
With all {growth["paper"][-1].experts} experts the paper's gate fires in {fires["paper"]} of {len(norms)} \
layers, the scale-free one in {fires["scale_free"]}. The largest update of a layer is \
{median(ratios):.1f} times its smallest, at the median. The largest ‖Δ‖ is {largest:.2g}; near 1 the \
paper's γ has a pole, whatever the experts."""
    columns = ["experts", "subsets", "γ, paper", "gate fires", "γ, scale-free", "gate fires"]
    rows = [
        [
            str(paper.experts),
            str(paper.subsets),
            f"{paper.gamma:.3f}",
            f"{paper.fired:.0%}",
            f"{free.gamma:.3f}",
            f"{free.fired:.0%}",
        ]
        for paper, free in zip(growth["paper"], growth["scale_free"], strict=True)
    ]
    return (
        f"{said}\n\n{markdown(columns, rows)}\n\nγ: median over the layers, mean over the subsets."
    )


def _draw(title: str, norms: Norms, growth: Mapping[str, Sequence[Point]]) -> Any:
    figure, (depth, count) = _plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    names = list(norms)
    for statistic in STATISTICS:
        tau, colour = DEFAULT_TAU[statistic], _COLOURS[statistic]
        gammas = [
            gate(list(of.values()), tau=tau, statistic=statistic).gamma for of in norms.values()
        ]
        depth.plot([g / tau for g in gammas], ".-", lw=0.8, color=colour, label=_LABELS[statistic])
        points = growth[statistic]
        across = [point.experts for point in points]
        count.plot(across, [point.gamma / tau for point in points], "o-", color=colour)
        share = [100 * point.fired for point in points]
        for x, point, percent in zip(across, points, share, strict=True):
            count.annotate(
                f"{percent:.0f} %",
                (x, point.gamma / tau),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=colour,
            )
    for axes in (depth, count):
        axes.axhline(1, color="black", ls="--", lw=1)
        axes.set_yscale("symlog", linthresh=0.1)
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    places = range(0, len(names), max(1, len(names) // 8))
    depth.set_xticks(places, [short(names[p]) for p in places], rotation=40, ha="right", fontsize=6)
    depth.set_ylabel("γ / τ; above 1 the gate fires")
    depth.set_title("Every layer, from input to output, all experts", fontsize=9)
    count.set_xticks([point.experts for point in growth["paper"]])
    count.set_xlabel("number of experts; labels: share of layers whose gate fires")
    count.set_title("Median over the layers, mean over subsets", fontsize=9)
    figure.suptitle(f"How differently scaled the experts are: {title}", fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    return figure
