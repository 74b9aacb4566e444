"""Train a suite's experts, merge them by every method, put all models to the test."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

import covmerge
import covmerge_lab
from covmerge import __version__
from covmerge.base import code
from covmerge.files.stores.disk import replace_file
from covmerge_lab import collecting, merging
from covmerge_lab.merging import TUNED, Experts
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.suite import Scores, Suite, Variant
from covmerge_lab.workers import Job, OnProgress, Result, Workers

BASE, EXPERTS = "base, experts' heads", "experts, each on its task"


@dataclass(frozen=True)
class Scored:
    """A model and how it did.

    Attributes:
        scores: of each example, by task.
        measures: what else was measured of it.
    """

    model: Model
    scores: Mapping[str, Scores]
    measures: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Outcome:
    """What came of one variant of the experts of some tasks."""

    variant: Variant
    tasks: tuple[str, ...]
    models: tuple[Scored, ...]


class Bench:
    """Runs suites; everything it makes beside the experts is gone at the end.

    Args:
        suite: what is trained, merged and scored.
        workers: processes that share the work.
        console: where the progress is shown.
    """

    def __init__(self, suite: Suite, workers: Workers, console: Console) -> None:
        self.suite = suite
        self.seconds: dict[str, float] = {}
        self._workers = workers
        self._console = console

    def prepare(self) -> None:
        """Fetch the data and make the base."""
        with self._stage("data and base"):
            self._workers.run({self.suite.name: self.suite.prepare})

    def train(self, variant: Variant, tasks: Sequence[str]) -> None:
        """Train the experts that are not there yet."""
        with self._stage(f"{variant}: training experts"):
            self._workers.run({t: partial(self.suite.train, t, variant) for t in tasks})

    @contextmanager
    def experts(
        self, variant: Variant, tasks: Sequence[str], statistics: Sequence[str] = ()
    ) -> Generator[Experts]:
        """Give trained experts, whole too, with statistics; a work folder with them.

        Args:
            variant: how they were trained.
            tasks: which.
            statistics: kinds to collect, see `collecting.jobs`.
        """
        work = _work_folder(self.suite.folder / "work")
        folders = {task: self.suite.expert(task, variant) for task in tasks}
        whole = folders
        try:
            if variant.kind == "lora":
                with self._stage(f"{variant}: experts made whole"):
                    jobs = {
                        t: partial(
                            merging.make_whole, self.suite, t, folders[t], work / "whole" / t
                        )
                        for t in tasks
                    }
                    whole = self._workers.run(jobs)
            if statistics:
                with self._stage(f"{variant}: statistics of the layers' inputs"):
                    self._workers.run(
                        collecting.jobs(self.suite, whole, statistics, work / "statistics")
                    )
            base = self.suite.base
            yield Experts(
                self.suite, variant, base, folders, whole, work / "statistics", work / "merged"
            )
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def merge(
        self, experts: Experts, merges: Sequence[Merge], *, tuned: bool = False
    ) -> list[Model]:
        """Merge the experts; with `tuned` also by Task Arithmetic, tuned on validation examples."""
        jobs: dict[str, Job[list[Model]]] = {
            f"merging, part {number}": partial(
                merging.merge_together, experts, part, f"part-{number}"
            )
            for number, part in enumerate(merging.passes(merges), start=1)
        }
        if tuned:
            jobs[merging.TUNED] = partial(merging.tuned_task_arithmetic, experts)
        found = self.work(f"{experts.variant}: merging {len(experts.folders)} experts", jobs)
        return [model for models in found.values() for model in models]

    def score(
        self, experts: Experts, models: Sequence[Model], *, measured: bool = True
    ) -> list[Scored]:
        """Put models to the test of every task; those that are not one model are not measured."""
        suite = self.suite
        jobs: dict[str, Job[list[Any]]] = {
            task: partial(_scores, suite, task, experts.folders[task], models)
            for task in experts.tasks
        }
        single = [m for m in models if len(set(m.folders.values())) == 1] if measured else []
        jobs["measures"] = partial(_measures, suite, single)
        found = self.work(f"{experts.variant}: scoring {len(models)} models", jobs)
        measures = dict(zip((m.title for m in single), found["measures"], strict=True))
        return [
            Scored(model, {t: found[t][i] for t in experts.tasks}, measures.get(model.title, {}))
            for i, model in enumerate(models)
        ]

    def work(self, title: str, jobs: Mapping[str, Job[Result]]) -> dict[str, Result]:
        """Run jobs of a study as a stage."""
        with self._stage(title):
            return self._workers.run(jobs)

    def run(
        self, variant: Variant, tasks: Sequence[str], methods: Sequence[str] | None = None
    ) -> Outcome:
        """Do all of it for the experts of some tasks, less what the same code did before.

        Scores are kept after each part, so that an interrupted run loses one part at most. Task
        Arithmetic is tuned where it is among the methods.

        Args:
            variant: how the experts are trained.
            tasks: which.
            methods: merge by these only; None for all.
        """
        merges = merging.catalogue(variant.kind, methods)
        of_tasks = hashlib.sha256(repr(tuple(tasks)).encode()).hexdigest()[:12]
        path = self.suite.folder / "outcomes" / f"{variant}-{of_tasks}.json"
        key = sources()
        before = load_outcome(path, key, variant)
        kept = {scored.model.title: scored for scored in before.models} if before else {}
        always = [EXPERTS, BASE]
        if methods is None or "task_arithmetic" in methods:
            always.append(TUNED)
        parts: Sequence[Sequence[Merge]] = merging.parts([m for m in merges if m.title not in kept])
        if not parts and any(title not in kept for title in always):
            parts = [[]]
        for part in parts:
            self.train(variant, tasks)
            missing = [title for title in always if title not in kept]
            for scored in self._part(variant, tasks, part, missing):
                kept[scored.model.title] = scored
            save_outcome(Outcome(variant, tuple(tasks), tuple(kept.values())), path, key)
        titles = [*always, *(merge.title for merge in merges)]
        return Outcome(variant, tuple(tasks), tuple(kept[title] for title in titles))

    def _part(
        self, variant: Variant, tasks: Sequence[str], merges: Sequence[Merge], also: Sequence[str]
    ) -> list[Scored]:
        """Make and score some merges, and those of the bounds and of `TUNED` that are asked for."""
        kinds = sorted({kind for merge in merges if (kind := merging.statistics_of(merge))})
        with self.experts(variant, tasks, kinds) as experts:
            ends = [model for model in bounds(experts) if model.title in also]
            models = [*ends, *self.merge(experts, merges, tuned=TUNED in also)]
            return self.score(experts, models)

    def kept(self, name: str, variant: Variant, make: Callable[[], Outcome]) -> Outcome:
        """Return what came of something, made now unless the same code made it before.

        Args:
            name: of what is made, unlike all others.
            variant: of the experts that it is made of.
            make: makes it.
        """
        path = self.suite.folder / "outcomes" / f"{name}.json"
        key = sources()
        outcome = load_outcome(path, key, variant)
        if outcome is None:
            outcome = make()
            save_outcome(outcome, path, key)
        return outcome

    @contextmanager
    def _stage(self, title: str) -> Generator[None]:
        self._console.print(title, style="bold", highlight=False)
        started = time.perf_counter()
        yield
        seconds = self.seconds.get(title, 0.0) + time.perf_counter() - started
        self.seconds[title] = round(seconds, 1)


def _work_folder(parent: Path) -> Path:
    """Return this process's own folder; those of runs that were killed are removed."""
    parent.mkdir(exist_ok=True)
    for left in parent.iterdir():
        if not (left.name.isdigit() and psutil.pid_exists(int(left.name))):
            shutil.rmtree(left, ignore_errors=True)
    work = parent / str(os.getpid())
    work.mkdir()
    return work


def bounds(experts: Experts) -> tuple[Model, Model]:
    """Return what a merge lies between."""
    base = dict.fromkeys(experts.folders, experts.base)
    return Model(Section.BOUNDS, EXPERTS, experts.whole), Model(Section.BOUNDS, BASE, base)


def machine() -> dict[str, Any]:
    """Return what the results say of where they were made."""
    return {
        "covmerge": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def sources() -> str:
    """Return a hash of all our code: outcomes of another state of it are not taken for this one's."""
    return code.digest(covmerge, covmerge_lab)


def save_outcome(outcome: Outcome, path: Path, key: str) -> None:
    """Keep an outcome, without its models, so that a run that is interrupted need not repeat it."""
    content = {
        "key": key,
        "tasks": outcome.tasks,
        "models": [
            {
                "section": scored.model.section.name,
                "title": scored.model.title,
                "method": scored.model.merge and scored.model.merge.method,
                "parameters": scored.model.merge and dict(scored.model.merge.parameters),
                "seconds": scored.model.seconds,
                "scores": scored.scores,
                "measures": scored.measures,
            }
            for scored in outcome.models
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content))


def load_outcome(path: Path, key: str, variant: Variant) -> Outcome | None:
    """Read an outcome that was kept under this key."""
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if stored.get("key") != key:
        return None
    models: list[Scored] = []
    for each in stored["models"]:
        section = Section[each["section"]]
        merge = each["method"] and Merge(each["method"], each["parameters"], section)
        model = Model(section, each["title"], {}, merge, each["seconds"])
        models.append(Scored(model, each["scores"], each["measures"]))
    return Outcome(variant, tuple(stored["tasks"]), tuple(models))


def _scores(
    suite: Suite, task: str, expert: Path, models: Sequence[Model], on_progress: OnProgress
) -> list[Scores]:
    found: list[Scores] = []
    for model in models:
        on_progress(len(found), len(models))
        found.append(suite.score(task, "test", model.folders[task], expert))
    on_progress(len(found), len(models))
    return found


def _measures(
    suite: Suite, models: Sequence[Model], on_progress: OnProgress
) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for model in models:
        on_progress(len(found), len(models))
        found.append(suite.measures(next(iter(model.folders.values()))))
    on_progress(len(found), len(models))
    return found
