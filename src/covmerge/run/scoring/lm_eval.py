"""Score with lm-eval: `lm-eval:arc_easy,gsm8k`, or `lm-eval:./tasks,mine` with a folder of own tasks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from covmerge.base.errors import CheckFailed, InputError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.json_file import read_object
from covmerge.run.scoring.files import digest_of
from covmerge.run.scoring.values import Score, Scores


def by_tasks(wanted: Sequence[str]) -> _LmEval:
    """Return a scorer on lm-eval tasks; a folder among the names holds definitions of own tasks."""
    folders = [part for part in wanted if Path(part).is_dir()]
    tasks = [part for part in wanted if part not in folders]
    if len(folders) > 1 or not tasks:
        raise InputError(
            f"{Hint('score')} lm-eval:{','.join(wanted)} names {len(folders)} folders and {len(tasks)} "
            "tasks: name tasks, and one folder with definitions of your own at most"
        )
    return _LmEval(tasks, Path(folders[0]) if folders else None)


class _LmEval:
    def __init__(self, tasks: Sequence[str], folder: Path | None) -> None:
        self._tasks, self._folder = list(tasks), folder
        self.name = f"lm-eval:{','.join([*([str(folder)] if folder else []), *tasks])}"

    @property
    def key(self) -> str:
        files = sorted(self._folder.rglob("*.y*ml")) if self._folder else []
        return f"{self.name} {version('lm_eval')} {digest_of(files)}"

    def check(self) -> None:
        task_manager(self._tasks, self._folder)

    def score(self, model: Path) -> Scores:
        found = evaluate(model, self._tasks, include_path=self._folder, samples=True)
        return dict(_scores(found, self._tasks))


def evaluate(
    folder: Path,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    samples: bool = False,
) -> Any:
    """Return the result of `lm_eval.simple_evaluate` for a model, or for an adapter on its base.

    Raises:
        InputError: a folder or a task does not exist, or a file that they need cannot be fetched.
    """
    # Imported here: lm-eval is optional, and its import takes seconds. Its annotations are partial.
    lm_eval: Any = importlib.import_module("lm_eval")
    arguments = _model_arguments(folder)
    manager = task_manager(tasks, include_path)
    try:
        return lm_eval.simple_evaluate(
            model="hf",
            model_args=arguments,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            batch_size=batch_size,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            log_samples=samples,
        )
    except OSError as error:
        if error.errno is not None:
            raise
        # transformers and datasets raise OSError without errno for missing files that cannot be fetched.
        raise InputError(f"{folder} cannot be evaluated on {', '.join(tasks)}: {error}") from error


def task_manager(tasks: Sequence[str], include_path: str | Path | None) -> Any:
    """Return lm-eval's index of tasks; its own 14 000 definitions are loaded only if needed.

    Loading them takes tens of seconds.

    Raises:
        InputError: the folder or a task does not exist.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(f"{include_path} is no folder: name one that holds definitions of tasks")
    manager: Any = importlib.import_module("lm_eval.tasks").TaskManager
    if include_path is not None:
        given = manager(include_path=str(include_path), include_defaults=False)
        # A group or a tag may have members that are lm-eval's own.
        if set(tasks) <= set(given.all_subtasks):
            return given
    found = manager(include_path=include_path and str(include_path))
    known: list[str] = found.all_tasks
    for task in tasks:
        if task not in known:
            raise InputError(f"lm-eval has no task '{task}'.{_near(task, known)}")
    return found


def _near(task: str, known: Sequence[str]) -> str:
    """Return a hint with the nearest task name, as lm-eval has too many tasks to list."""
    near = did_you_mean(task, known)
    if near.startswith(" Did"):
        return near
    return " `lm-eval ls tasks` lists all; your own are found in a folder that you name"


def _model_arguments(folder: Path) -> dict[str, Any]:
    if (folder / "config.json").is_file():
        return {"pretrained": str(folder)}
    config = folder / "adapter_config.json"
    base = read_object(config).get("base_model_name_or_path")
    if not base:
        raise InputError(f"{config} names no base: put its folder under 'base_model_name_or_path'")
    return {"pretrained": base, "peft": str(folder)}


def _scores(found: Mapping[str, Any], wanted: Sequence[str]) -> Iterator[tuple[str, Score]]:
    """Yield the first metric of each task. A tag has no metric, so its member tasks are used."""
    results: Mapping[str, Mapping[str, Any]] = found["results"]
    tasks = [task for task in wanted if task in results and _first(results[task])]
    if not tasks:
        tasks = [task for task, entries in results.items() if _first(entries)]
    if not tasks:
        raise CheckFailed(f"lm-eval found no number for {', '.join(wanted)}: choose other tasks")
    for task in tasks:
        key = _first(results[task])
        assert key is not None
        metric, _, filtered = key.partition(",")
        more: Any = found.get("higher_is_better", {}).get(task, {}).get(metric, True)
        sign = -1.0 if more is False else 1.0
        examples = _examples(found.get("samples", {}).get(task, ()), metric, filtered)
        value = float(results[task][key])
        paired = examples and isclose(fmean(examples), value, rel_tol=1e-6, abs_tol=1e-9)
        name = f"{task} ({'-' if sign < 0 else ''}{metric})"
        yield name, Score(sign * value, tuple(sign * e for e in examples) if paired else None)


def _first(entries: Mapping[str, Any]) -> str | None:
    """Return the key of the first metric in `{"alias": ..., "acc,none": 0.5, "acc_stderr,none": 0.1}`."""
    for key, value in entries.items():
        metric, comma, _ = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            return key
    return None


def _examples(samples: Any, metric: str, filtered: str) -> list[float]:
    chosen = [s for s in samples if s.get("filter", filtered) == filtered]
    chosen.sort(key=lambda sample: sample.get("doc_id", 0))
    values = [sample.get(metric) for sample in chosen]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return numbers if len(numbers) == len(values) else []
