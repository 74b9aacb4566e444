"""The memory that this process may use (limits of the machine, container and Slurm job) and has used."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import psutil

from covmerge.base.settings import Hint

MACHINE = "this machine's memory"

# Files of a cgroup: its limit, its usage, and the entries for file pages, which the kernel can reclaim.
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_MIB = 2**20  # the unit of Slurm's limits
_MORE = 16 * _MIB  # growth of what trimming did not return, before it is tried again
_MOST_READ, _MOST_DIGITS = 2**16, 19


@dataclass(frozen=True)
class Memory:
    """An amount of memory, and which limit sets it."""

    size: int  # bytes
    # `this machine's memory`, or the tighter limit with the file or variable it is read from
    whose: str = MACHINE


@dataclass(frozen=True)
class Allowance:
    """The memory that a run may use, and how a message describes it."""

    size: int  # bytes
    given: str  # the words that follow the number in a message: who set the limit
    # whether memory that the process already uses counts towards `size`; else `size` comes on top of it
    in_all: bool


def give_back() -> None:
    """Return to the system the memory that glibc's malloc has freed but kept; elsewhere do nothing.

    Large tensors that are allocated and freed leave holes in its heaps, which add up over a model's blocks.
    """
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"  # reads only Python's own executable


class HeapTrimmer:
    """A trimmer that returns freed memory to the system whenever the process exceeds its limit in bytes."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._process = psutil.Process()

    def trim(self) -> None:
        """Return freed memory if the limit is exceeded; if too little comes free, raise the limit."""
        if self._most is not None and self._process.memory_info().rss > self._most:
            give_back()
            self._most = max(self._most, self._process.memory_info().rss + _MORE)


def allowance(max_memory: int | None, processes: int = 1) -> Allowance:
    """Return the memory that this process may use: `max_memory` in all, or its share of what is free.

    Example:
        >>> allowance(2**30).in_all, allowance(None).in_all
        (True, False)
    """
    if max_memory is not None:
        return Allowance(max_memory, f"are allowed ({Hint('max_memory')})", in_all=True)
    free = free_memory(processes)
    return Allowance(free.size, f"of {free.whose} are free", in_all=False)


def free_memory(
    processes: int = 1, *, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> Memory:
    """Return how much more memory this process may use.

    The tightest of these limits counts: the machine's available memory; what is left of the limits of
    this process's cgroup and of those above it (Docker, Kubernetes, systemd, Slurm); and the memory that
    Slurm gave the job, which holds even where no cgroup enforces it. `processes` such processes share it.
    """
    machine = Memory(psutil.virtual_memory().available // processes)
    found = [
        *(Memory(group.size // processes, group.whose) for group in _groups(root)),
        *(
            Memory(max(0, job.size // processes - psutil.Process().memory_info().rss), job.whose)
            for job in _slurm(environment)
        ),
    ]
    return min([machine, *found], key=lambda memory: memory.size)


def _groups(root: Path) -> Iterator[Memory]:
    """Yield what is left of the limits of this process's cgroup and of those above it."""
    for mount, names, (limit, taken, reclaimed) in _mounts(root):
        # In a container the path is often the host's, and the container's own group is the mount point.
        for depth in range(len(names), -1, -1):
            folder = mount.joinpath(*names[:depth])
            most, now = _number(folder / limit), _number(folder / taken)
            if most is not None and now is not None:
                files = min(now, _stat(folder / "memory.stat", reclaimed))
                whose = f"the memory limit of this cgroup ({folder / limit})"
                yield Memory(max(0, most - (now - files)), whose)


def _mounts(root: Path) -> Iterator[tuple[Path, tuple[str, ...], tuple[str, str, tuple[str, str]]]]:
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        names = PurePosixPath(path).parts[1:]
        # ".." means a process outside the root of its cgroup namespace, whose group's folder is unknown.
        names = () if ".." in names else names
        if not controllers:
            yield root / "sys/fs/cgroup", names, _V2
        elif "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory", names, _V1


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel; none if the file is missing or cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_READ).splitlines()
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return []


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file, or if it says `max` for no limit."""
    return next((_digits(line.strip()) for line in _lines(path)), None)


def _stat(path: Path, names: tuple[str, ...]) -> int:
    fields = (line.split() for line in _lines(path))
    return sum(_digits(field[1]) or 0 for field in fields if len(field) == 2 and field[0] in names)


def _digits(text: str) -> int | None:
    """Return the number that plain digits write; None for other text, and for too many digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _slurm(environment: Mapping[str, str]) -> Iterator[Memory]:
    """Yield the memory that Slurm gave the job on this node, if its variables say so; 0 means all of it."""
    per_node = _given(environment, "SLURM_MEM_PER_NODE")
    if per_node:
        yield Memory(per_node * _MIB, "Slurm's memory limit (SLURM_MEM_PER_NODE)")
    per_core = _given(environment, "SLURM_MEM_PER_CPU")
    cores = _given(environment, "SLURM_CPUS_ON_NODE")
    if per_core and cores:
        yield Memory(per_core * cores * _MIB, "Slurm's memory limit (SLURM_MEM_PER_CPU)")


def _given(environment: Mapping[str, str], name: str) -> int:
    return _digits(environment.get(name, "")) or 0


def peak_memory() -> int:
    """Return the most memory this process has held resident, in bytes."""
    try:
        # Not ru_maxrss: a child process inherits its parent's value.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    windows: int | None = getattr(psutil.Process().memory_info(), "peak_wset", None)
    if windows is not None:
        return windows
    import resource  # for macOS, which has no /proc; there ru_maxrss counts bytes

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
