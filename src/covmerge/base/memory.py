"""The memory that this process may take (of the machine, its container, its Slurm job) and has taken."""

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

# A cgroup's own limit, what it has taken, and of that the pages of files, which the kernel takes back.
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_MIB = 2**20  # Slurm's unit
_MORE = 16 * _MIB  # held beyond what could not be given back before it is tried again
_MOST_READ, _MOST_DIGITS = 2**16, 19


@dataclass(frozen=True)
class Memory:
    """An amount of memory, and what sets it.

    Attributes:
        size: bytes.
        whose: `this machine's memory`, or the limit that is tighter, with what it is read from.
    """

    size: int
    whose: str = MACHINE


@dataclass(frozen=True)
class Allowance:
    """What a run may take, and how a message says so.

    Attributes:
        size: bytes.
        given: by whom, behind the number.
        in_all: whether what the process has already counts; else these are beside it.
    """

    size: int
    given: str
    in_all: bool


def give_back() -> None:
    """Give what glibc's malloc keeps of freed memory back to the system; elsewhere do nothing.

    Large tensors that come and go leave holes in its heaps, which add up over a model's blocks.
    """
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"  # which reads Python's own file


class HeapTrimmer:
    """Has malloc give back what it keeps, whenever this process holds more than it should.

    Args:
        most: bytes that it should hold; None: any number.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._process = psutil.Process()

    def trim(self) -> None:
        """Return freed memory to the system; where that was too little, try again once more is held."""
        if self._most is not None and self._process.memory_info().rss > self._most:
            give_back()
            self._most = max(self._most, self._process.memory_info().rss + _MORE)


def allowance(max_memory: int | None, processes: int = 1) -> Allowance:
    """Return what this process may take.

    Args:
        max_memory: bytes that it may have in all; None: what is free beside what it has.
        processes: as many as this one, which share what is free.

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
    """Return what this process may take beside what it has.

    Where several limits hold the tightest counts: what the machine has free, what is left of the limits of
    this process's cgroup and of those above it (Docker, Kubernetes, systemd, Slurm), and what
    Slurm says that the job was given, which holds too where no cgroup enforces it.

    Args:
        processes: as many as this one, which share it.
        root: of the file system that tells of cgroups.
        environment: has Slurm's variables.
    """
    machine = Memory(psutil.virtual_memory().available // processes)
    found = [
        *(
            Memory(max(0, group.limit - group.taken) // processes, group.whose)
            for group in _groups(root)
        ),
        *(
            Memory(max(0, job.size // processes - psutil.Process().memory_info().rss), job.whose)
            for job in _slurm(environment)
        ),
    ]
    return min([machine, *found], key=lambda memory: memory.size)


@dataclass(frozen=True)
class _Group:
    limit: int
    taken: int
    whose: str


def _groups(root: Path) -> Iterator[_Group]:
    """Go from this process's cgroup up; where there are none, or none with a limit, nothing comes."""
    for mount, names, (limit, taken, reclaimed) in _mounts(root):
        # In a container the path is often the host's, and the container's own group is the mount itself.
        for depth in range(len(names), -1, -1):
            folder = mount.joinpath(*names[:depth])
            most, now = _number(folder / limit), _number(folder / taken)
            if most is not None and now is not None:
                files = min(now, _stat(folder / "memory.stat", reclaimed))
                yield _Group(
                    most, now - files, f"the memory limit of this cgroup ({folder / limit})"
                )


def _mounts(root: Path) -> Iterator[tuple[Path, tuple[str, ...], tuple[str, str, tuple[str, str]]]]:
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        names = PurePosixPath(path).parts[1:]
        # A process outside its cgroup namespace's root: where its group is cannot be told from here.
        names = () if ".." in names else names
        if not controllers:
            yield root / "sys/fs/cgroup", names, _V2
        elif "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory", names, _V1


def _lines(path: Path) -> list[str]:
    """Return what the kernel says in a file; nothing where there is none, or none that can be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_READ).splitlines()
    except (OSError, ValueError):  # of a name with a zero byte
        return []


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is no file, or `max` for no limit."""
    return next((_digits(line.strip()) for line in _lines(path)), None)


def _stat(path: Path, names: tuple[str, ...]) -> int:
    fields = (line.split() for line in _lines(path))
    return sum(_digits(field[1]) or 0 for field in fields if len(field) == 2 and field[0] in names)


def _digits(text: str) -> int | None:
    """Return a number that is written in plain digits, and no more of them than a size of memory has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _slurm(environment: Mapping[str, str]) -> Iterator[Memory]:
    """Return what Slurm gave the job on this node, where it says so; 0 is all of the node's memory."""
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
