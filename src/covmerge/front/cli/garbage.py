"""Python's cyclic garbage collector, in a process that lives for one command."""

from __future__ import annotations

import atexit
import gc

# Objects more than were freed before the youngest are looked through; 700 in Python itself. A plan
# of a few thousand work items is made of a million, none of which is garbage.
_YOUNG = 50_000


def collect_seldom() -> None:
    """Look for garbage rarely, and not at all at the end, where the process gives all back.

    What is not in a cycle, as tensors, is freed at once either way. At the end the interpreter would
    look once more through everything that torch made when it was imported.
    """
    gc.set_threshold(_YOUNG)
    atexit.register(gc.freeze)
