"""Statistics files from the experts' own training examples, without their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from covmerge import collect, collect_regmean_pp
from covmerge_lab.suite import Suite
from covmerge_lab.workers import CollectSteps, Job, OnProgress

EXAMPLES = {
    "gram": 256,
    "regmean++": 256,
    "fisher": 16,  # a backward pass through the whole model for every label; 64 did no better
}


def jobs(
    suite: Suite, experts: Mapping[str, Path], kinds: Sequence[str], out: Path
) -> dict[str, Job[None]]:
    """Return the jobs that collect statistics, by what they collect; the longest first.

    Args:
        suite: whose examples.
        experts: folders of whole models, by task.
        kinds: some of `EXAMPLES`.
        out: folder of the statistics files.
    """
    for kind in kinds:
        (out / kind).mkdir(parents=True, exist_ok=True)
    found: dict[str, Job[None]] = {}
    if "regmean++" in kinds:
        found["regmean++"] = partial(_behind_merged_blocks, suite, experts, out)
    for kind in ("fisher", "gram"):
        if kind in kinds:
            found |= {
                f"{kind}, {task}": partial(_of_one, suite, kind, task, experts[task], out)
                for task in experts
            }
    return found


def files(out: Path, kind: str, experts: Sequence[str]) -> dict[str, Path]:
    """Return where the statistics of one kind are, by expert."""
    return {name: out / kind / f"{name}.covstats.safetensors" for name in experts}


def _of_one(
    suite: Suite, kind: str, task: str, expert: Path, out: Path, on_progress: OnProgress
) -> None:
    collect(
        expert,
        suite.inputs(task, EXAMPLES[kind]),
        files(out, kind, [task])[task],
        kinds=[kind],
        progress=CollectSteps(on_progress, EXAMPLES[kind]),
        overwrite=True,
    )


def _behind_merged_blocks(
    suite: Suite, experts: Mapping[str, Path], out: Path, on_progress: OnProgress
) -> None:
    examples = {task: suite.inputs(task, EXAMPLES["regmean++"]) for task in experts}
    collect_regmean_pp(
        suite.base,
        experts,
        examples,
        out / "regmean++",
        progress=CollectSteps(on_progress),
        overwrite=True,
    )
