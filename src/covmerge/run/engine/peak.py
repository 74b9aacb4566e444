"""The most memory that this process has held, which every system tells in another way."""

from __future__ import annotations

from pathlib import Path

import psutil


def peak_memory() -> int:
    """Return the most memory this process has held resident, in bytes."""
    try:
        # Not ru_maxrss: a child process starts with its parent's as its own.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    windows: int | None = getattr(psutil.Process().memory_info(), "peak_wset", None)
    if windows is not None:
        return windows
    import resource  # of macOS, the other system without /proc, where it counts in bytes

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
