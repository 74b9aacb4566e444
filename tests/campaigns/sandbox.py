"""A process that reads inputs under the promise, and what it says of them through a pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns.inputs import Content, Laid
from tests.campaigns.promise import Broken, Watch, broken, limit_memory
from tests.campaigns.readers import IN, OUT, Reader

_SILENT = 30.0  # seconds after which a process is taken to hang
_BUSY = 20.0  # seconds of CPU after which it does
_ALLOWED = (str(IN), "tmp", "cache")

Say = Callable[[Mapping[str, Any]], None]


@dataclass
class Outcome:
    """What became of the inputs of one reader.

    Attributes:
        counts: of inputs, by how reading them ended.
        failures: by their kind, with the number of the input.
        last: the last error.
        seconds: of CPU.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[tuple[int, Broken]]] = field(default_factory=dict)
    last: str = ""
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        return sum(self.counts.values())

    @property
    def read(self) -> int:
        return self.counts["read"]

    @property
    def failed(self) -> int:
        return sum(map(len, self.failures.values()))

    def fail(self, number: int, fault: Broken) -> None:
        """Count an input that broke the promise."""
        self.failures.setdefault(fault.kind, []).append((number, fault))

    def add(self, other: Outcome) -> None:
        """Count what another has counted."""
        self.counts += other.counts
        self.seconds += other.seconds
        for failures in other.failures.values():
            for number, fault in failures:
                self.fail(number, fault)


class Sandbox:
    """This process from now on: limited, watched, and silent. It cannot be undone.

    Args:
        reader: what is read.
        home: the working directory, with `given`, `out`, `tmp`, `cache` and `outside`.
    """

    def __init__(self, reader: Reader, home: Path) -> None:
        self._reader = reader
        os.environ["TMPDIR"] = str(home / "tmp")
        os.environ["COVMERGE_CACHE"] = str(home / "cache")
        tempfile.tempdir = None
        os.fsync = lambda fd: None  # nothing here outlives a loss of power
        warnings.simplefilter("ignore")
        sys.dont_write_bytecode = True  # of a package that is imported as an input is read
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        self._laid = Laid(home / IN)
        self._laid.clear()
        self._watch = Watch(home, _ALLOWED)
        limit_memory()

    def read(self, files: Mapping[str, Content]) -> dict[str, Any]:
        """Read one input, and return what became of it."""
        reader = self._reader
        self._laid.lay(files)
        ended, told, fault = broken(
            lambda: reader.read(IN),
            self._watch,
            named=reader.named,
            writes=("out",) if reader.writes else (),
            reaches=reader.reaches,
            names={f"{IN}", *reader.names, *(Path(path).name for path in files)},
        )
        fault = fault or _left(ended)
        if reader.writes or reader.changes:
            self._laid.clear()
        kind, detail = (None, told) if fault is None else (fault.kind, fault.detail)
        return {"outcome": ended, "kind": kind, "detail": detail}


def forked(work: Callable[[Say], None], outcome: Outcome) -> int:
    """Have a process of its own do work that says what it begins and what came of it.

    Returns:
        the number of the last input that was begun; -1: none was.

    Raises:
        SystemExit: the process failed where it read nothing.
    """
    ours, theirs = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        code, spoken = 1, os.dup(2)
        try:
            with os.fdopen(theirs, "w", buffering=1) as said:
                work(lambda record: said.write(json.dumps(record) + "\n") and None)
            code = 0
        except BaseException:
            os.write(spoken, traceback.format_exc().encode(errors="replace"))
        finally:
            os._exit(code)
    os.close(theirs)
    begun, last, death = None, -1, None
    with os.fdopen(ours, "rb", buffering=0) as heard:
        for line in _lines(heard, pid):
            if line is None:
                death = f"no answer for {_SILENT:.0f} s"
                os.kill(pid, signal.SIGKILL)
                break
            record = json.loads(line)
            if "begin" in record:
                begun = last = record["begin"]
                continue
            begun = None
            outcome.counts[record["outcome"]] += 1
            outcome.last = record["detail"]
            if record["kind"] is not None:
                outcome.fail(record["number"], Broken(record["kind"], record["detail"]))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if begun is not None:
        outcome.counts["died"] += 1
        outcome.fail(begun, Broken(death or f"the process died ({code})", ""))
    elif code:
        raise SystemExit(f"a process of the campaign itself failed ({code})")
    return last


def _used(pid: int) -> float:
    """Seconds of CPU that a process has taken."""
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


def _left(ended: str) -> Broken | None:
    """An output where there was an error, which nobody may find; and a clean slate."""
    left = sorted(path.name for path in OUT.iterdir())
    for path in OUT.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    wrong = [name for name in left if not name.startswith(".")]
    if ended not in ("read", "CheckFailed") and wrong:
        return Broken(f"left {wrong[0]} behind", ended)
    return None


def _lines(heard: Any, pid: int) -> Iterator[bytes | None]:
    """Lines that a process writes into a pipe; None where none comes for long."""
    waiting, used = b"", _used(pid)
    while True:
        ready, _, _ = select.select([heard], [], [], _SILENT)
        if not ready:
            if 0.1 < _used(pid) - used < _BUSY:  # others have the machine
                continue
            yield None
            return
        used = _used(pid)
        chunk = heard.read(1 << 16)
        if not chunk:
            return
        *whole, waiting = (waiting + chunk).split(b"\n")
        yield from whole
