"""Programs in processes of their own, forked off one that has imported torch and covmerge, to save seconds.

What covmerge imports late, transformers for example, is not imported before the fork.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest

_ANEW = ("covmerge", "filelock")  # and what looks at the system when it is imported
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "psutil", "covmerge.front.job", "covmerge.front.cli"])


class Forked:
    """A running program, with what tests use of `subprocess.Popen`.

    Args:
        program: Python.
        arguments: its `sys.argv[1:]`.
        path: folders before all others on its `sys.path`.
        environment: all of its variables; by default those of the test.
        cwd: where it runs.
        anew: it imports covmerge itself, as the order of imports or what it changes before decides.
    """

    def __init__(
        self,
        program: str,
        *arguments: object,
        path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        anew: bool = False,
    ) -> None:
        said = Path(tempfile.mkdtemp(prefix="forked-"))
        weakref.finalize(self, shutil.rmtree, said)
        self._streams = [said / "stdout", said / "stderr"]
        given = ["-c", *map(str, arguments)]
        variables = dict(os.environ if environment is None else environment)
        self._process = SERVER.Process(
            target=_run,
            args=(program, given, list(map(str, path)), variables, cwd, self._streams, anew),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, of a signal the negative number; None: it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """See `returncode`."""
        return self.returncode

    def wait(self) -> int:
        """Wait for its end."""
        self._process.join()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def communicate(self) -> tuple[str, str]:
        """Wait for its end, and return what it has written to stdout and stderr."""
        self.wait()
        stdout, stderr = (path.read_text() if path.exists() else "" for path in self._streams)
        return stdout, stderr


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Fork the workers of merges too; how they start in earnest tests/engine/test_processes.py shows."""
    patch.setattr("covmerge.run.engine.processes._SPAWN", SERVER)


def run(program: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; options are those of `Forked`."""
    process = Forked(program, *arguments, **options)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess([program], process.wait(), stdout, stderr)


def printed(program: str, *arguments: object, **options: object) -> str:
    """What a program prints, which must end well."""
    done = run(program, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run(
    program: str,
    given: list[str],
    path: list[str],
    variables: dict[str, str],
    cwd: Path | None,
    streams: list[Path],
    anew: bool,
) -> None:
    for number, stream in zip((1, 2), streams, strict=True):
        file = os.open(stream, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    # A shell has its background commands ignore Ctrl-C, and what they start with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    if cwd is not None:
        os.chdir(cwd)
    if anew:
        for name in [own for own in sys.modules if own.partition(".")[0] in _ANEW]:
            del sys.modules[name]
    sys.argv, sys.path[:0] = given, path
    exec(program, {"__name__": "__main__"})
