"""Statistics files from the experts' own training texts, without their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from covmerge.statistics import collect, collect_regmean_pp
from demo.encode import Encoded, Inputs
from demo.tasks import Task
from demo.train import SETTINGS
from demo.workers import Job, Steps, Tell

TEXTS = {
    "gram": 256,
    "regmean++": 256,
    "fisher": 16,  # a backward pass through the whole model for every label; 64 did no better
}
BATCH_SIZE = 32


def jobs(
    base: Path, experts: Mapping[str, Path], suite: Sequence[Task], out: Path
) -> dict[str, Job[None]]:
    """Return the jobs that collect all statistics, by what they collect; the longest first."""
    for kind in TEXTS:
        (out / kind).mkdir(parents=True, exist_ok=True)
    by_labels = sorted(suite, key=lambda task: len(task.labels), reverse=True)
    return {
        "regmean++": partial(_behind_merged_blocks, base, experts, suite, out / "regmean++"),
        **{
            f"{kind}, {task.name}": partial(
                _of_one, kind, experts[task.name], task, files(out, kind, [task.name])[task.name]
            )
            for kind in ("fisher", "gram")
            for task in by_labels
        },
    }


def files(out: Path, kind: str, experts: Sequence[str]) -> dict[str, Path]:
    """Return where the statistics of one kind are, by expert."""
    return {name: out / kind / f"{name}.covstats.safetensors" for name in experts}


def _of_one(kind: str, expert: Path, task: Task, out: Path, tell: Tell) -> None:
    steps = Steps(tell, TEXTS[kind])
    collect(expert, _texts(expert, task, kind), out, kinds=[kind], progress=steps, overwrite=True)


def _behind_merged_blocks(
    base: Path, experts: Mapping[str, Path], suite: Sequence[Task], out: Path, tell: Tell
) -> None:
    texts = {task.name: _texts(base, task, "regmean++") for task in suite}
    collect_regmean_pp(base, experts, texts, out, progress=Steps(tell), overwrite=True)


def _texts(tokenizer: Path, task: Task, kind: str) -> list[Inputs]:
    texts = task.train.first(TEXTS[kind])
    batches = Encoded(tokenizer, texts, SETTINGS[task.name].max_length).in_order(BATCH_SIZE)
    return [inputs for inputs, _ in batches]
