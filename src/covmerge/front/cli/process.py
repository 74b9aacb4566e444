"""Memory of a process that lives for one command: garbage collection, and what malloc keeps."""

from __future__ import annotations

import atexit
import ctypes
import gc
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


# Objects more than were freed before the youngest are searched for garbage; 700 in Python itself. A plan
# of a few thousand work items is made of a million, none of which is garbage.
_YOUNG = 50_000


def collect_seldom() -> None:
    """Search for garbage rarely, and not at all at the end, where the process gives all back.

    What is not in a cycle, as tensors, is freed at once either way. At the end the interpreter would
    search once more everything that torch made when it was imported.
    """
    gc.set_threshold(_YOUNG)
    atexit.register(gc.freeze)
