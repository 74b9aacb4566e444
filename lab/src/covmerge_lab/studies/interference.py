"""Does ACTMat's theory explain how near ΔᵀΔ comes to the covariance of a layer's inputs?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

from covmerge_lab.bench import Bench
from covmerge_lab.studies.angles import Angles
from covmerge_lab.studies.controlled import Size, Training, run_training
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Variant
from covmerge_lab.workers import Job

# Its annotations are partial.
_plt: Any = plt

TRAININGS = (
    Training("SGD", 1e-2),
    Training("SGD + momentum", 1e-2),
    Training("AdamW", 5e-5),
    Training("AdamW", 2e-4),
    Training("AdamW", 8e-4),
    Training("AdamW", 5e-4, lora=True),
    Training("AdamW", 2e-3, lora=True),
)
_SIZE = Size(batch=16, steps=(15, 30, 60), held=16)
_QUICK = Size(batch=4, steps=(1, 2), held=2)

PARTS = {
    "optimiser": "ε_optimiser",
    "cross": "ε_cross",
    "corr": "ε_corr",
    "drift": "ε_drift",
}
_COLOURS = ("#767676", "#1f5fa8", "#3d7f4d", "#b3541e")
_INK = "#000000"


@dataclass(frozen=True)
class _Run:
    """What was found of one training: the seeds' layers side by side, by steps."""

    training: Training
    layers: Mapping[int, Sequence[Angles]]

    def middle(self, steps: int, angle: str) -> float:
        """Return an angle's median over layers and seeds."""
        return median(getattr(layer, angle) for layer in self.layers[steps])


class Interference(Study):
    """ACTMat's theory, layer by layer."""

    name = "interference"
    about = (
        "How near is ΔᵀΔ to the covariance C of a layer's inputs, and does the bound of ACTMat's Theorem "
        "3.1 explain it? Short trainings of the base, with the inputs and output gradients of every "
        "adapted layer recorded at every step. Angles in degrees; 90° is the most that two covariances "
        "can be apart."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        suite = bench.suite
        size = _QUICK if bench.suite.quick else _SIZE
        asked = [(t, v.seed) for v in variants for t in TRAININGS if t.lora == (v.kind == "lora")]
        jobs: dict[str, Job[dict[int, dict[str, Angles]]]] = {
            f"{training.title}, seed {seed}": partial(run_training, suite, training, seed, size)
            for training, seed in asked
        }
        found = bench.work(f"controlled trainings on '{suite.controlled_task}'", jobs)
        by_job = list(zip(asked, found.values(), strict=True))
        runs = [
            _Run(
                training,
                {
                    steps: [a for (t, _), of in by_job if t == training for a in of[steps].values()]
                    for steps in size.steps
                },
            )
            for training in dict.fromkeys(training for training, _ in asked)
        ]
        numbers = {
            "task": suite.controlled_task,
            "batch": size.batch,
            "runs": [
                {**asdict(training), "seed": seed, "steps": {k: _rounded(v) for k, v in of.items()}}
                for (training, seed), of in by_job
            ],
        }
        pictures = {"bound": _draw_bound(runs), "steps": _draw_steps(runs)}
        return Findings(numbers, text(runs), pictures)


def _rounded(layers: Mapping[str, Angles]) -> dict[str, dict[str, float]]:
    return {
        name: {key: round(value, 3) for key, value in asdict(found).items()}
        for name, found in layers.items()
    }


def text(runs: Sequence[_Run]) -> str:
    """Say what came out, and give the table."""
    last = max(runs[0].layers)
    everywhere = [found for run in runs for layers in run.layers.values() for found in layers]
    of_last = [found for run in runs for found in run.layers[last]]
    silent = sum(found.bound >= 90 for found in everywhere)
    nearer = sum(found.true < found.identity for found in of_last)
    beyond_chance = sum(found.true < found.rotated for found in of_last)
    held = f"""\
The bound holds in all {len(everywhere)} measurements (layers × steps × trainings), with \
{min(found.slack for found in everywhere):.3f}° to spare at the least. This it must: angles are a metric. \
What it says is another matter: two covariances are never more than 90° apart, and the bound is at or \
above 90° in {silent} of {len(everywhere)} measurements, where it says nothing.

After {last} steps ΔᵀΔ is nearer to C than the identity is in {nearer} of {len(of_last)} layers, and \
nearer than its own spectrum in random directions in {beyond_chance}. Medians: true angle \
{median(found.true for found in of_last):.1f}°, identity \
{median(found.identity for found in of_last):.1f}°, random rotation \
{median(found.rotated for found in of_last):.1f}°, bound \
{median(found.bound for found in of_last):.1f}°."""
    legend = """\
Medians over the layers. bound: the sum of the four ε; true: ∠(ΔᵀΔ, C); centred: the same with the mean \
row taken off Δ and the mean input off z, as ACE centres; I: ∠(I, C); rotated: ∠ of ΔᵀΔ turned at random \
and C; said: share of layers where the bound is below 90°. C is measured on examples that are not trained \
on."""
    columns = [
        "training",
        "steps",
        *PARTS.values(),
        "bound",
        "true",
        "centred",
        "I",
        "rotated",
        "said",
    ]
    rows = [
        [
            run.training.title,
            str(steps),
            *(
                f"{run.middle(steps, key):.1f}"
                for key in (*PARTS, "bound", "true", "centred", "identity", "rotated")
            ),
            f"{sum(found.bound < 90 for found in layers) / len(layers):.0%}",
        ]
        for run in runs
        for steps, layers in run.layers.items()
    ]
    return f"{held}\n\n{markdown(columns, rows)}\n\n{legend}"


def _draw_bound(runs: Sequence[_Run]) -> Any:
    """Draw the parts of the bound, stacked, and what they bound."""
    last = max(runs[0].layers)
    figure, axes = _plt.subplots(figsize=(7.5, 0.5 * len(runs) + 1.9), layout="constrained")
    for place, run in enumerate(reversed(runs)):
        left = 0.0
        for (key, name), colour in zip(PARTS.items(), _COLOURS, strict=True):
            width = run.middle(last, key)
            label = name if place == 0 else None
            axes.barh(place, width, left=left, color=colour, alpha=0.75, label=label)
            left += width
        for key, mark, name in (
            ("true", "o", "true angle ∠(ΔᵀΔ, C)"),
            ("identity", "|", "∠(I, C)"),
            ("rotated", "x", "ΔᵀΔ turned at random"),
        ):
            label = name if place == 0 else None
            axes.plot(run.middle(last, key), place, mark, color=_INK, ms=7, label=label)
    axes.axvline(90, color="#c0392b", ls="--", lw=1, label="90°: says nothing beyond")
    axes.set_yticks(range(len(runs)), [run.training.title for run in reversed(runs)], fontsize=8)
    axes.set_xlabel(f"angle, degrees; medians over the layers after {last} steps")
    axes.set_title("Theorem 3.1: the bound (bars) against the true angle (dots)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=7, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_steps(runs: Sequence[_Run]) -> Any:
    """Draw the true angle over the steps, and that of every layer at the end."""
    figure, (left, right) = _plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for run in runs:
        steps = list(run.layers)
        middles = [run.middle(k, "true") for k in steps]
        (line,) = left.plot(steps, middles, "o-", label=run.training.title)
        right.plot(
            [found.true for found in run.layers[steps[-1]]], ".-", lw=0.6, c=line.get_color()
        )
    right.plot(
        [found.identity for found in runs[0].layers[max(runs[0].layers)]],
        "--",
        color=_INK,
        lw=1,
        label="∠(I, C), first training",
    )
    left.set_xlabel("steps of the training")
    left.set_ylabel("∠(ΔᵀΔ, C), degrees")
    right.set_xlabel("layer, from input to output")
    left.set_title("Median over the layers", fontsize=9)
    right.set_title("Every layer, after the last step", fontsize=9)
    figure.suptitle("How near ΔᵀΔ comes to the inputs' covariance: lower is nearer", fontsize=10)
    figure.legend(fontsize=7, loc="outside lower center", ncols=4, frameon=False)
    return figure
