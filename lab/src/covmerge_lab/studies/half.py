"""What it costs that released models are stored in half precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from covmerge.run.scoring.values import Interval
from covmerge_lab.bench import EXPERTS, Bench, Outcome
from covmerge_lab.merging import Experts
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.studies.accuracy import bars
from covmerge_lab.studies.altered import Rounded, base_in_half, expert_in_half
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Kind, Variant
from covmerge_lab.summary import Group, difference, summarise
from covmerge_lab.workers import Job, OnProgress

_HALF = ", bfloat16"
KNOWN = ("average", "ties", "tsv_m", "iso_c", "ace", "aswudi")
AUTO = (Merge("auto"),)


class Half(Study):
    """Experts in float32 beside the same in bfloat16."""

    name = "half"
    about = (
        "What does it cost that released models are stored in half precision? The base is rounded to "
        "bfloat16, and each expert is the rounded base plus its update, rounded again: where an update is "
        "shorter than half a last place of its weight, nothing of it is left. What is merged of these is "
        "stored in bfloat16 too. Full fine-tunes alone; all models are scored as the suite does it, "
        "language models with their weights in bfloat16."
    )
    kinds: ClassVar[tuple[Kind, ...]] = ("full",)

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        found = [_outcome(bench, variant) for variant in variants]
        outcomes = [outcome for outcome, _ in found]
        rounded = [each for _, of_seed in found for each in of_seed]
        group = summarise(outcomes)
        titles = [row.title for row in group.rows if not row.title.endswith(_HALF)]
        less = {title: difference(outcomes, title + _HALF, title) for title in titles}
        lost = {
            "unchanged": fmean(each.unchanged for each in rounded),
            "error": fmean(each.error for each in rounded),
        }
        return Findings(
            {
                "groups": [group.as_json()],
                "lost": lost,
                "less": {title: vars(interval) for title, interval in less.items()},
            },
            "\n\n".join([f"## {group.title}", _table(group, less), _legend(lost)]),
            {"accuracy-half": _draw(group, titles)},
        )


def _outcome(bench: Bench, variant: Variant) -> tuple[Outcome, Sequence[Rounded]]:
    tasks = tuple(bench.suite.subsets[-1])
    bench.train(variant, tasks)
    with bench.experts(variant, tasks, []) as experts:
        half, rounded = _in_half(bench, experts)
        of_half = [replace(m, title=m.title + _HALF) for m in _models(bench, half)]
        scored = bench.score(experts, [*_models(bench, experts), *of_half], measured=False)
        return Outcome(variant, tasks, tuple(scored)), rounded


def _in_half(bench: Bench, experts: Experts) -> tuple[Experts, Sequence[Rounded]]:
    """Store the base and the experts in bfloat16, beside the merges of those in float32."""
    out = experts.work.with_name("half")
    out.mkdir()
    base = base_in_half(experts.base, out / "base")
    jobs: dict[str, Job[Rounded]] = {
        task: partial(_make, folder, experts.base, out / task)
        for task, folder in experts.folders.items()
    }
    made = bench.work(f"{experts.variant}: experts stored in bfloat16", jobs)
    folders = {task: each.folder for task, each in made.items()}
    half = replace(
        experts,
        base=base,
        folders=folders,
        whole=folders,
        work=out / "merged",
    )
    return half, list(made.values())


def _make(expert: Path, base: Path, out: Path, on_progress: OnProgress) -> Rounded:
    on_progress(0, 1)
    found = expert_in_half(expert, base, out)
    on_progress(1, 1)
    return found


def _models(bench: Bench, experts: Experts) -> list[Model]:
    merges = [*(Merge(method) for method in KNOWN), *AUTO]
    bound = Model(Section.BOUNDS, EXPERTS, experts.whole)
    return [bound, *bench.merge(experts, merges, tuned=True)]


def _legend(lost: Mapping[str, float]) -> str:
    return (
        "- bfloat16 less float32: of the mean accuracy in %, on the same examples, with the 95 % interval "
        "of the paired bootstrap; *: it leaves 0 out\n"
        f"- of the weights of tensors that experts changed {lost['unchanged']:.0%} are the base's once "
        f"more; rounding took {lost['error']:.2f} of the length of the update, mean of the experts"
    )


def _table(group: Group, less: Mapping[str, Interval]) -> str:
    rows: list[list[str]] = []
    for title, found in less.items():
        means = (100 * group.row(name).mean.mean for name in (title, title + _HALF))
        mark = "*" if found.clear else ""
        span = f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]{mark}"
        rows.append([title, *(f"{mean:.1f}" for mean in means), span])
    return markdown(["model", "float32", "bfloat16", "bfloat16 less float32"], rows)


def _draw(group: Group, titles: Sequence[str]) -> Any:
    merges = [title for title in titles if title != EXPERTS]
    shown = [name for title in merges for name in (title, title + _HALF)]
    return bars(group, shown, "the same experts in float32 and in bfloat16")
