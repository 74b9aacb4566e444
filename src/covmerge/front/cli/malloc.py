"""Memory that is freed here stays with the process, for the next block."""

from __future__ import annotations

import ctypes
import os
import platform

_SETTINGS = (  # of mallopt(3), by the variable that sets the same
    ("MALLOC_TRIM_THRESHOLD_", -1, 64 * 2**20),
    ("MALLOC_MMAP_THRESHOLD_", -3, 32 * 2**20),
    ("MALLOC_ARENA_MAX", -8, 1),
)


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep some tens of MB that were freed, and one heap for all threads.

    By itself it gives the temporaries of every step back to the system, which then clears their
    pages anew for the next step. Elsewhere, and for whatever the environment sets, nothing changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for variable, number, value in _SETTINGS:
        if variable not in os.environ:
            libc.mallopt(number, value)
