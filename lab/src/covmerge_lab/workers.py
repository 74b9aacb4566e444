"""Worker processes, one a core, each with one thread: they do not wait for one another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.managers import SyncManager
from threading import Thread
from typing import TypeVar

import torch
import transformers
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Result = TypeVar("Result")
OnProgress = Callable[[int, int], None]  # steps done, steps in all
Job = Callable[[OnProgress], Result]


def ignore_progress(done: int, total: int) -> None:
    """Do nothing."""


class Workers:
    """Processes that stay for the whole run: each imports torch and transformers once.

    Args:
        console: where the progress of the jobs is shown.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Workers:
        # Read by a process as it starts: keep the memory of large tensors rather than give it back
        # to the system at every step; gradients over many labels are twice as fast.
        os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
        self._manager = SyncManager()
        self._manager.start(_watch_parent)
        self._pool = ProcessPoolExecutor(
            os.cpu_count() or 1, mp_context=get_context("spawn"), initializer=_begin
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._manager.shutdown()

    def run(self, jobs: Mapping[str, Job[Result]]) -> dict[str, Result]:
        """Run jobs in the order given, with a bar and an estimate for each; return all results."""
        steps: MutableMapping[str, tuple[int, int]] = self._manager.dict()
        bars = Progress(
            TextColumn("{task.description:>24}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        with bars:
            bar_of = {name: bars.add_task(name, total=None, start=False) for name in jobs}
            runs = {
                name: self._pool.submit(job, partial(_keep_progress, steps, name))
                for name, job in jobs.items()
            }
            running = set(runs.values())
            while running:
                finished, running = wait(running, timeout=0.5, return_when=FIRST_EXCEPTION)
                for run in finished:
                    run.result()
                for name, (done, total) in steps.items():
                    bars.start_task(bar_of[name])
                    bars.update(bar_of[name], completed=done, total=total)
        return {name: run.result() for name, run in runs.items()}


def _keep_progress(
    steps: MutableMapping[str, tuple[int, int]], name: str, done: int, total: int
) -> None:
    steps[name] = done, total


@dataclass
class _Steps:
    """Passes on what covmerge says of its progress.

    Attributes:
        on_progress: called with the steps done and all steps.
        total: steps in all, where covmerge does not know.
    """

    on_progress: OnProgress
    total: int = 0
    done: int = 0

    def start(self, total: int | None) -> None:
        """Work begins."""
        self.total = total or self.total
        self.on_progress(0, self.total)

    def finish(self) -> None:
        """Work is over."""

    def _add(self, size: int) -> None:
        self.done += size
        self.on_progress(self.done, self.total)


class MergeSteps(_Steps):
    """Of a merge."""

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        """A tensor is done."""
        self._add(size)


class CollectSteps(_Steps):
    """Of collecting statistics."""

    def advance(self, count: int) -> None:
        """Examples have passed."""
        self._add(count)


def _begin() -> None:
    """Prepare a worker process."""
    prepare()
    _watch_parent()


def _watch_parent() -> None:
    """End this process with its parent: killed, a parent cannot tell it to."""
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "it runs in worker processes alone"
    parent.join()
    os._exit(1)  # the job in hand has nobody left to report to


def prepare() -> None:
    """Use one thread, and keep transformers from reporting every checkpoint that it loads."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
