"""What every benchmark says of its machine, and how it times a process."""

from __future__ import annotations

import compileall
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import torch

import covmerge
from covmerge.errors import InputError
from covmerge.run.engine.devices import usable_device


def machine(device: str = "cpu") -> dict[str, object]:
    """The machine and the versions that decide speed; of a GPU its name."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
    return {
        "processor": _processor(),
        **gpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def usable(device: str) -> str:
    """The device that was asked for, if there is one."""
    try:
        return str(usable_device(device))
    except InputError as error:
        raise SystemExit(str(error)) from error


def clock(device: str = "cpu") -> float:
    """Seconds, when all that a GPU was given before is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "")


def spawn(
    argv: Sequence[str], *, log: Path | None = None, env: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Run a command the way a user starts it; what the operating system says of it.

    The peak of a child begins at its parent's: whoever measures memory stays small.
    """
    _compile_own()
    sink = os.devnull if log is None else str(log)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    # Its own output is of no interest, and must not be mixed into this one's.
    quiet = [(os.POSIX_SPAWN_OPEN, stream, sink, flags, 0o644) for stream in (1, 2)]
    started = time.perf_counter()
    pid = os.posix_spawnp(argv[0], list(argv), dict(env or os.environ), file_actions=quiet)
    # Its counters are there until it is waited for.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    asked = _bytes_asked_for(pid)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"failed: {subprocess.list2cmdline(argv)}; its output: {sink}")
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "disk_bytes_read": usage.ru_inblock * 512,
        **asked,
    }


@cache
def _compile_own() -> None:
    """Compile covmerge's modules, as pip does with what it installs.

    Run from its sources where Python may not write (PYTHONDONTWRITEBYTECODE), every start would compile
    them anew, and those of what it is compared with would not.
    """
    compileall.compile_dir(Path(covmerge.__file__).parent, quiet=1)


def _bytes_asked_for(pid: int) -> dict[str, float]:
    """What a process read by calls, from the page cache too; Linux alone says so."""
    try:
        counters = Path(f"/proc/{pid}/io").read_text("ascii").split()
    except OSError:
        return {}
    return {"bytes_read": int(counters[counters.index("rchar:") + 1])}


def cool(files: Sequence[Path]) -> None:
    """Take files out of the page cache, so that they are read from the disk."""
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def spread(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure over the rounds."""
    return {
        key: {
            "median": median(run[key] for run in runs),
            "min": min(run[key] for run in runs),
            "max": max(run[key] for run in runs),
        }
        for key in runs[0]
    }
