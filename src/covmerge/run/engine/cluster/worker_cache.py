"""What a process of the cluster keeps from one task to the next: open sources, and what tasks share."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch

from covmerge.base.errors import InputError
from covmerge.base.settings import Form
from covmerge.base.version import __version__
from covmerge.run.engine.cluster.connection import ray_module
from covmerge.run.engine.executor import Task
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.processes import Opener


@dataclass(frozen=True)
class Opening:
    """How a process of the cluster opens the sources.

    Attributes:
        opener: opens them.
        versions: of covmerge and torch, which must be those of the nodes.
    """

    opener: Opener
    versions: tuple[str, str] = (__version__, torch.__version__)


@dataclass(frozen=True)
class Setup:
    """What the tasks of one run have in common.

    Attributes:
        task: without sources.
        threads: of an item that is computed on all cores.
        form: of the settings in messages.
    """

    task: Task
    threads: int
    form: Form


class WorkerCache:
    """What a process of the cluster keeps from one task to the next."""

    def __init__(self) -> None:
        self._key = ""
        self._stack = ExitStack()
        self._reference: object = None
        self._setup: Setup | None = None

    def sources(self, key: str, reference: Any) -> Sources:
        """Return the sources, opened.

        Args:
            key: of the executor that they are of.
            reference: to how they are opened.
        """
        if self._key != key:
            self._stack.close()
            self._key = ""
            opening = cast("Opening", ray_module().get(reference))
            _check_versions(opening.versions)
            self._sources = self._stack.enter_context(opening.opener())
            self._key = key
        return self._sources

    def setup(self, reference: Any) -> Setup:
        """Return what a task needs beside."""
        if self._setup is None or self._reference != reference:
            self._setup, self._reference = cast("Setup", ray_module().get(reference)), reference
        return self._setup


# Of this process.
WORKER_CACHE = WorkerCache()


def _check_versions(wanted: tuple[str, str]) -> None:
    here = (__version__, torch.__version__)
    if here != wanted:
        raise InputError(
            f"the nodes of the cluster have covmerge {here[0]} and torch {here[1]}, and who merges has "
            f"{wanted[0]} and {wanted[1]}: install the same on all"
        )
