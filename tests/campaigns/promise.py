"""What every reader promises of every input, and how it is seen whether it keeps it.

A named error that says which file, or success; within 5 seconds of CPU and 500 MB beside what was there;
nothing written but in the output, nothing read behind a link or a name that leads out of the folder, no
process, no connection but to the server that was named, and nothing of the input run.
"""

from __future__ import annotations

import os
import resource
import stat
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covmerge.errors import CovmergeError
from tests.campaigns.trees import TRIP

SECONDS = 5.0
# An intact folder of DCP takes 350 to 430 MB of address space, 64 MB for the heap of each thread.
BYTES = 640 * 2**20
MESSAGE = 26_000  # characters that an error may have

_SRC = "/src/covmerge/"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset(
    f"os.{name}"
    for name in (
        "mkdir",
        "rename",
        "remove",
        "rmdir",
        "symlink",
        "link",
        "truncate",
        "chmod",
        "chown",
    )
)
_NEVER = frozenset(
    (
        *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn"),
        *(
            "socket.connect",
            "socket.bind",
            "socket.sendto",
            "socket.getaddrinfo",
            "webbrowser.open",
        ),
    )
)
# The one process that reading starts, which has limits of its own, and what Python asks for libraries.
_STARTED = ("pattern_process.py", "ldconfig")


@dataclass(frozen=True)
class Broken:
    """A promise that was not kept.

    Attributes:
        kind: which, and where in the code: what is the same of many inputs.
        detail: what to read.
    """

    kind: str
    detail: str


class Watch:
    """Sees what this process opens, changes and starts. It cannot be taken off again."""

    def __init__(self, home: Path, allowed: tuple[str, ...]) -> None:
        self._home = os.path.realpath(home)
        self._allowed = tuple(f"{self._home}/{name}" for name in allowed)
        self._seen: list[str] = []
        self._on = False
        sys.addaudithook(self._hook)

    def start(
        self, *, named: bool, writes: tuple[str, ...], reaches: Collection[tuple[str, int]]
    ) -> None:
        """Watch what follows; `named`: an input may say which files are read."""
        self._seen, self._named, self._reaches, self._on = [], named, reaches, True
        self._writable = (*self._allowed, *(f"{self._home}/{name}" for name in writes))

    def stop(self) -> list[str]:
        """Return what was seen that should not be."""
        self._on = False
        return self._seen

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or not (
            event == "open" or event in _CHANGES or event in _NEVER or event == "subprocess.Popen"
        ):
            return
        self._on = False
        try:
            fault = self._fault(event, arguments)
        finally:
            self._on = True
        if fault is not None:
            self._seen.append(fault)

    def _fault(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        if event == "subprocess.Popen":
            ours = any(own in str(arguments[1]) for own in _STARTED)
            return None if ours else f"started {arguments[1]}"
        if event == "socket.connect" and tuple(arguments[1][:2]) in self._reaches:
            return None
        if event == "socket.getaddrinfo" and tuple(arguments[:2]) in self._reaches:
            return None
        if event in _NEVER:
            return f"{event} {arguments!r}"[:300]
        path = arguments[1 if event in ("os.symlink", "os.link") else 0]  # what is made
        if isinstance(path, int):
            return None
        flags = (arguments[2] or 0) if event == "open" else _WRITES
        if flags & os.O_NOFOLLOW and Path(os.fsdecode(path)).is_symlink():
            return None  # will be refused
        place = os.path.realpath(_folder_of(event, arguments) + os.fsdecode(path))
        if not flags & _WRITES:
            strange = place.startswith((f"{self._home}/outside", "/etc/passwd", "/dev/zero"))
            return f"read {place}" if strange and not self._named else None
        if place.startswith(self._writable) or place == "/dev/null":
            return None
        return f"{event} {place}"


def _folder_of(event: str, arguments: tuple[Any, ...]) -> str:
    """The folder that a path is relative to, where a descriptor of one is among the arguments."""
    for own in arguments[1:] if event != "open" else ():
        if isinstance(own, int) and own > 2 and Path(f"/proc/self/fd/{own}").is_dir():
            return f"/proc/self/fd/{own}/"
    return ""


def limit_memory() -> None:
    """Let this process have no more than `BYTES` beside what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def broken(
    read: Callable[[], object],
    watch: Watch,
    *,
    named: bool,
    writes: tuple[str, ...],
    reaches: Collection[tuple[str, int]],
    names: set[str],
) -> tuple[str, str, Broken | None]:
    """Read an input, and return how it ended, with what message, and what promise was not kept."""
    before = _kept()
    started = time.process_time()
    watch.start(named=named, writes=writes, reaches=reaches)
    error: BaseException | None = None
    try:
        read()
    except KeyboardInterrupt:
        raise
    except BaseException as caught:  # the panic of a library in Rust is no Exception
        error = caught
    finally:
        seen = watch.stop()
    seconds = time.process_time() - started
    faults = list(_faults(error, seconds, seen, names))
    if Path(TRIP).exists():
        faults.append(Broken("code was run", TRIP))
        Path(TRIP).rmdir()
    if _kept() != before:
        faults.append(Broken("changed a file outside", repr(_kept())))
    outcome = "read" if error is None else type(error).__name__
    return outcome, f"{error or ''}"[:MESSAGE], faults[0] if faults else None


def _faults(
    error: BaseException | None, seconds: float, seen: list[str], names: set[str]
) -> Iterator[Broken]:
    where = _where(error)
    if seen:
        yield Broken(f"{seen[0].split()[0]} outside", "; ".join(seen[:5]))
    if seconds > SECONDS:
        yield Broken(f"took {seconds:.0f} s", where)
    if error is None:
        return
    told = f"{type(error).__name__}: {error}"
    if not isinstance(error, CovmergeError):
        text = "".join(traceback.format_exception(error))
        yield Broken(f"{type(error).__name__} at {where}", text[:1500] + "\n...\n" + text[-2500:])
        return
    if error.exit_code not in (1, 2):
        yield Broken(f"exit code {error.exit_code}", told)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            yield Broken(f"memory was refused at {_where(cause)}", told[:2000])
        cause = cause.__cause__ or cause.__context__
    if len(told) > MESSAGE:
        yield Broken(f"{len(told) // 1000}000 characters of message at {where}", told[:600])
    if not any(name in told for name in names):
        yield Broken(f"names no file at {where}", told[:1000])


def _where(error: BaseException | None) -> str:
    """The innermost place in covmerge."""
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if _SRC in frame.filename]
    return f"{ours[-1].filename.rpartition(_SRC)[2]}:{ours[-1].lineno}" if ours else "?"


def _kept() -> dict[str, tuple[int, int]]:
    """What lies outside of the input, by size and time of change."""
    found: dict[str, tuple[int, int]] = {}
    for entry in os.scandir("outside"):
        about = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(about.st_mode):
            found[entry.name] = about.st_size, about.st_mtime_ns
    return found
