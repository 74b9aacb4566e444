"""Train all experts at once, one a core."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from multiprocessing import Manager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo import workers
from demo.tasks import Task
from demo.train import SETTINGS, train_expert


def train_all(
    base: Path, suite: Sequence[Task], folder: Path, console: Console
) -> tuple[dict[str, Path], dict[str, float]]:
    """Train the experts that are not there yet.

    Returns:
        By task: each expert's folder, and seconds per step of those trained now.
    """
    columns = TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn()
    with (
        Manager() as manager,
        workers.pool(len(suite)) as pool,
        Progress(*columns, TimeElapsedColumn(), console=console) as bars,
    ):
        done = manager.dict()
        folders = {task.name: folder / task.name for task in suite}
        bar_of = {task.name: bars.add_task(task.name, total=None, start=False) for task in suite}
        trainings = {
            task.name: pool.submit(_train, base, task, folders[task.name], done)
            for task in sorted(suite, key=_cost, reverse=True)  # longest first: cores end together
        }
        running = set(trainings.values())
        while running:
            finished, running = wait(running, timeout=0.5, return_when=FIRST_EXCEPTION)
            for training in finished:
                training.result()
            for name, steps in done.items():
                bars.start_task(bar_of[name])
                bars.update(bar_of[name], total=SETTINGS[name].steps, completed=steps)
        seconds = {name: training.result() for name, training in trainings.items()}
    return folders, {name: value for name, value in seconds.items() if value is not None}


def _train(base: Path, task: Task, out: Path, done: MutableMapping[str, int]) -> float | None:
    settings = SETTINGS[task.name]
    done[task.name] = 0

    def progress(step: int) -> None:
        done[task.name] = step

    seconds = train_expert(base, task, settings, out, progress)
    progress(settings.steps)
    return seconds


def _cost(task: Task) -> int:
    settings = SETTINGS[task.name]
    return settings.steps * settings.max_length
