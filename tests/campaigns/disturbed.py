"""The command line in processes forked off this one, which something happens to at a step of their choice.

A step is what a process does to files: opening, writing, flushing, making, renaming and removing them. They
are seen through an audit hook of Python's and around the calls that have none, so that a kill comes between
two of them, or half way through a write, at instants that no clock would reach.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from io import StringIO
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

from typer.main import get_command

from covmerge.front.cli import app
from covmerge.front.cli.outcome import interruptible

_HANGS = 120.0  # seconds after which a process is taken to hang
_NOBODY = 65534
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = frozenset(
    f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "link", "truncate", "scandir")
)
_CALLS = ("write", "fsync", "ftruncate", "posix_fallocate")
_PRELOADED = ("covmerge", "torch", "numpy", "psutil", "transformers", "safetensors")

_ASKING = frozenset({signal.SIGINT, signal.SIGTERM})

Do = Callable[[], None]


@dataclass(frozen=True)
class At:
    """What is done at a step: the how manieth, before it begins; `torn`: it is a write, half of it done."""

    step: int
    do: Do
    torn: bool = False


def kill_self() -> None:
    """End this process as nobody can prevent."""
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Counts the steps of this process; it cannot be taken off again."""

    def __init__(self, home: Path, at: At | None) -> None:
        self._home = str(home)
        self._at = at
        self._within = False
        self.count = self.writes = 0
        for name in _CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            self._step()
        elif event == "open" and isinstance(arguments[0], str | bytes | Path):
            ours = os.fsdecode(arguments[0]).startswith(self._home)
            if ours or (arguments[2] or 0) & _WRITES:
                self._step()

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: int, *given: Any) -> Any:
            if name == "write":
                self.writes += 1
                if self._at is not None and self._at.torn and self.writes == self._at.step:
                    call(fd, given[0][: len(given[0]) // 2])
                    self._at.do()
            self._step()
            # Nothing here outlives a loss of power.
            return None if name == "fsync" else call(fd, *given)

        return counted

    def _step(self) -> None:
        if self._within:
            return
        self.count += 1
        if self._at is not None and not self._at.torn and self.count == self._at.step:
            self._within = True
            try:
                self._at.do()
            finally:
                self._within = False


@dataclass
class Ended:
    """How a process ended: its exit code, of a signal the negative number, and what it said."""

    code: int
    said: str

    @property
    def named(self) -> bool:
        """Whether it was refused as it should be: by an error in words, exit code 1 or 2."""
        return self.code in (1, 2) and "error:" in self.said and "Traceback" not in self.said


class Child:
    """A process that runs the command line.

    Args:
        home: where it may leave what it says, and its temporary files.
        arguments: of `covmerge`.
        environment: variables that are added to those of this process.
        at: what happens to it at a step.
        before: what it does first.
        humble: it is run by nobody, to whom permissions matter, and not by root.
        counted: it leaves its `steps`.
    """

    _number = 0

    def __init__(
        self,
        home: Path,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        at: At | None = None,
        before: Do | None = None,
        humble: bool = False,
        counted: bool = False,
    ) -> None:
        Child._number += 1
        self._said = home / f"said-{Child._number}"
        self._counted = home / f"steps-{Child._number}"
        _command()
        sys.stdout.flush()
        sys.stderr.flush()
        self.begun = time.monotonic()
        # One that is asked to end is that when the command line has begun, and as long as it runs.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)
        else:
            code = 70
            try:
                self._prepare(home, environment or {}, humble)
                if before is not None:
                    before()
                steps = Steps(home, at)
                code = self._run(arguments)
                if counted:
                    told = {"steps": steps.count, "writes": steps.writes}
                    self._counted.write_text(json.dumps({**told, "modules": list(sys.modules)}))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def wait(self) -> Ended:
        """Wait for its end."""
        until = self.begun + _HANGS
        hung = False
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > until and not hung:
                hung = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)
        self.seconds = time.monotonic() - self.begun
        said = self._said.read_text(errors="replace") if self._said.exists() else ""
        self._said.unlink(missing_ok=True)
        if hung:
            return Ended(70, f"{said}\nTraceback: it hung for {_HANGS:.0f} s")
        return Ended(os.waitstatus_to_exitcode(status), said)

    def steps(self) -> tuple[int, int]:
        """Of one that has ended by itself: its steps, and how many of them were writes.

        What it has imported is imported here too, so that the next one need not do it.
        """
        told = json.loads(self._counted.read_text())
        for name in told["modules"]:
            if name not in sys.modules and not name.startswith("__"):
                with suppress(ImportError):
                    import_module(name)
        return told["steps"], told["writes"]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill_after(self, seconds: float, number: int = signal.SIGKILL) -> None:
        """Send it a signal so long after its start."""
        time.sleep(max(0.0, self.begun + seconds - time.monotonic()))
        self.kill(number)

    def _prepare(self, home: Path, environment: Mapping[str, str], humble: bool) -> None:
        said = os.open(self._said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.close(said)
        os.environ.update(environment)
        os.environ["TMPDIR"] = str(home / "tmp")
        tempfile.tempdir = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        share_server()
        if humble and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)

    def _run(self, arguments: Sequence[str]) -> int:
        try:
            with interruptible():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)
                _command()(list(arguments), prog_name="covmerge")
            return 0
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)


@cache
def _command() -> Any:
    """The command line, built once: typer takes as long for it as a small merge."""
    command = get_command(app)
    with suppress(SystemExit), redirect_stderr(StringIO()):  # what it keeps of its first use
        command(["merge", "--base", "/nowhere", "--expert", "a=/nowhere", "/nowhere"])
    return command


def start_server() -> None:
    """Start what the workers of all merges are forked off: a process that has imported what this one has.

    Python's dies of a request that is killed half way, and is then started again.
    """
    server = get_context("forkserver")
    server.set_forkserver_preload([name for name in sys.modules if name.startswith(_PRELOADED)])
    forkserver.ensure_running()
    own: Any = forkserver._forkserver  # type: ignore[attr-defined]
    while own._forkserver_address not in Path("/proc/net/unix").read_text():  # it is about to die
        time.sleep(0.01)
        forkserver.ensure_running()


def share_server() -> None:
    """Have this process, forked off the one that started the server, fork its workers there too."""
    processes: Any = __import__("covmerge.run.engine.processes", fromlist=["_SPAWN"])
    processes._SPAWN = get_context("forkserver")
    # It is no child of this process, and would be taken to be gone.
    own: Any = forkserver._forkserver  # type: ignore[attr-defined]
    own.ensure_running = lambda: None


def server_children() -> list[int]:
    """The workers that are there."""
    import psutil

    own: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if own._forkserver_pid is None:
        return []
    return [child.pid for child in psutil.Process(own._forkserver_pid).children()]


class Nodes:
    """A Ray cluster on this machine: a head that does nothing itself, and two nodes of a core.

    Attributes:
        address: of it.
    """

    _PROGRAM = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
head = {**node, "num_cpus": 0, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = [cluster.add_node(**node) for _ in range(2)]
print("address", cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "lose":
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
    else:
        nodes.append(cluster.add_node(**node))
    print("done", flush=True)
cluster.shutdown()
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_worker_niceness": "0"},
        )
        self.address = self._heard("address")[1]

    def lose(self) -> None:
        """Kill a node, with all that runs on it."""
        self._tell("lose")

    def replace(self) -> None:
        """Start another in the place of one that was lost."""
        self._tell("add")

    def workers(self) -> list[int]:
        """The processes that do tasks."""
        import psutil

        found: list[int] = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                # With a task, or waiting for one; the others are parts of a node.
                if process.name().startswith(("ray::_", "ray::IDLE")):
                    found.append(process.pid)
        return found

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _tell(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        self._heard("done")

    def _heard(self, first: str) -> list[str]:
        assert self._process.stdout is not None
        said = (line.split() for line in self._process.stdout)
        return next(words for words in said if words[:1] == [first])


def limit_memory(more: int, pid: int = 0) -> None:
    """Let a process have so many bytes more of address space than it has."""
    pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


class Cgroup:
    """A cgroup with a limit on memory, which the kernel enforces by `kill -9`. It takes root.

    Pages of the process that it was forked off do not count, as the two share them.
    """

    _ROOT = Path("/sys/fs/cgroup")

    def __init__(self, name: str) -> None:
        first = self._ROOT / "memory"  # of cgroups v1
        self._v1 = first.is_dir()
        self._place = (first if self._v1 else self._ROOT) / name
        self._place.mkdir()

    def limit(self, size: int) -> None:
        """Let the processes in it have so many bytes."""
        name = "memory.limit_in_bytes" if self._v1 else "memory.max"
        (self._place / name).write_text(str(size))

    def enter(self) -> None:
        """Put this process into it."""
        (self._place / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        """Remove it, which no process may be in."""
        self._place.rmdir()


class Disk:
    """A file system in memory, which only this process and its children see, of a size that can change.

    Attributes:
        place: where it is mounted.
        real: whether it could be mounted; else it is a folder like any other, and cannot fill up.
    """

    _LARGE = 64 << 20

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        self.real = self._mount(self._LARGE, private=True)

    def used(self) -> int:
        """Return how many bytes are taken."""
        about = os.statvfs(self.place)
        return (about.f_blocks - about.f_bfree) * about.f_frsize

    def resize(self, size: int) -> None:
        """Let it hold so many bytes, or what it holds already."""
        page = os.sysconf("SC_PAGE_SIZE")
        self._mount(max(size, self.used(), page) // page * page, again=True)

    def fill(self) -> None:
        """Leave no room."""
        self.resize(0)

    def widen(self) -> None:
        """Let it hold all that anybody wants."""
        self.resize(self._LARGE)

    def close(self) -> None:
        """Take it off."""
        if self.real:
            ctypes.CDLL(None).umount(os.fsencode(self.place))

    def _mount(self, size: int, *, private: bool = False, again: bool = False) -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, recursive_private, remount = 0x00020000, 0x4000 | 0x40000, 0x20
        if private and (
            libc.unshare(new_namespace)
            or libc.mount(b"none", b"/", None, ctypes.c_ulong(recursive_private), None)
        ):
            return False
        place, flags = os.fsencode(self.place), ctypes.c_ulong(remount if again else 0)
        return not libc.mount(b"none", place, b"tmpfs", flags, f"size={size}".encode())
