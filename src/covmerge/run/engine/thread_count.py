"""The number of usable cores, and the number of threads that torch computes with in each thread."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(count: int) -> None:
    """Let torch compute with `count` threads for all later operations of the calling thread.

    `torch.set_num_threads` alone does not do so: the first operation of a thread replaces its number by
    the number that any thread set last. Asking for the number counts as such an operation.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


@contextmanager
def torch_threads(count: int | None) -> Generator[None]:
    """Give torch this many threads for a while; None leaves its setting."""
    before = torch.get_num_threads()
    if count is not None:
        use_threads(count)
    try:
        yield
    finally:
        use_threads(before)
