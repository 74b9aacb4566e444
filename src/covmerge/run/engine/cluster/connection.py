"""A Ray cluster: where it is, and Ray itself, which is imported by who uses it alone."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch

from covmerge.base.errors import InputError
from covmerge.base.settings import Caller, Hint
from covmerge.base.version import __version__
from covmerge.run.engine.executor import Opener, Task
from covmerge.run.engine.inputs import Sources

_ANSWERS_IN = 10  # seconds


def cluster_address(given: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of the cluster: what was given, or that of the job that this is part of.

    Raises:
        InputError: there is neither, or it is one through which no folder is shared.
    """
    address = given or environment.get("RAY_ADDRESS")
    if not address:
        raise InputError(
            f"{Hint('executor', 'ray')}: which cluster? Give {Hint('address', 'HOST:PORT')}, or "
            f"{Hint('address', 'auto')} on one of its machines; within `ray job submit` it is known"
        )
    if address.startswith(("ray://", "http://", "https://")):
        raise InputError(
            f"{Hint('address', address)}: this process reads and writes the folder that the nodes share, "
            "so it runs on one of them. Start it by `ray job submit`, or give HOST:PORT"
        )
    return address


def ray_module() -> Any:
    """Return Ray, which is imported by who uses it alone."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise InputError(
            f'{Hint("executor", "ray")} needs Ray: pip install "covmerge[ray]"'
        ) from error


def connect(address: str) -> tuple[Any, bool]:
    """Return Ray, connected to a cluster, and whether it was not before."""
    ray = ray_module()
    if ray.is_initialized():
        return ray, False
    try:
        _check_answers(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise InputError(
            f"{Hint('address', address)}: there is no Ray cluster ({first})"
        ) from error
    return ray, True


def has_gpus(address: str) -> bool:
    """Whether Ray takes a node of the cluster to have a GPU."""
    ray, joined = connect(address)
    try:
        return any(node["Alive"] and node["Resources"].get("GPU", 0) >= 1 for node in ray.nodes())
    finally:
        if joined:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise OSError where nobody listens; Ray itself would try for several minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_ANSWERS_IN).close()


# What a process of the cluster keeps from one task to the next: open sources, and what tasks share.


@dataclass(frozen=True)
class Opening:
    """How a process of the cluster opens the sources; it must have these versions of covmerge and torch."""

    opener: Opener
    versions: tuple[str, str] = (__version__, torch.__version__)


@dataclass(frozen=True)
class Setup:
    """What the tasks of one run have in common; `threads` compute an item on all cores."""

    task: Task
    threads: int
    caller: Caller


class WorkerCache:
    """What a process of the cluster keeps from one task to the next."""

    def __init__(self) -> None:
        self._key = ""
        self._stack = ExitStack()
        self._reference: object = None
        self._setup: Setup | None = None

    def sources(self, key: str, reference: Any) -> Sources:
        """Return the sources, opened."""
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
