"""A Ray cluster: where it is, and Ray itself, which is imported by who uses it alone."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint

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
    """Return Ray, which is imported by who uses it alone.

    Raises:
        InputError: it is not installed.
    """
    try:
        return import_module("ray")
    except ImportError as error:
        raise InputError(
            f'{Hint("executor", "ray")} needs Ray: pip install "covmerge[ray]"'
        ) from error


def connect(address: str) -> tuple[Any, bool]:
    """Return Ray, connected to a cluster, and whether it was not before.

    Raises:
        InputError: it is not installed, or there is no cluster.
    """
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
    """Whether Ray takes a node of the cluster to have a GPU.

    Raises:
        InputError: Ray is not installed, or there is no cluster.
    """
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
