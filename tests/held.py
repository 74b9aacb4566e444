"""Merges in processes of their own that never get past one tensor, for tests that stop them half way.

A merge left to itself may be done before a test on a busy machine has seen that it began.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked import Forked

# Ctrl-C lets go of the thread that reads. A test run in the background would pass on that it
# ignores Ctrl-C, so the handler is set in any case.
_HOLD = """
import signal, sys, time
import covmerge.run.engine.threads as reader
from covmerge.plan.planning.operations import Count

counted, name = sys.argv.pop(1) == "global pass", sys.argv.pop(1)
read, interrupted = reader.read_inputs, []

def held(items, sources):
    tensor = items[0].tensor
    here = tensor.name == name and isinstance(tensor.operation, Count) == counted
    while here and not interrupted:
        time.sleep(0.002)
    return read(items, sources)

def interrupt(*_):
    interrupted.append(True)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
reader.read_inputs = held
"""
COMMAND_LINE = "from covmerge.front.cli import main; main()"


@contextmanager
def held(program: str, *arguments: object, before: str, stage: str = "run") -> Iterator[Forked]:
    """Run Python in a process whose merge waits before it reads the tensor `before`.

    Args:
        program: what to run, `COMMAND_LINE` for example.
        arguments: its `sys.argv[1:]`.
        before: the tensor; with one lane all that come before it in the plan are finished.
        stage: "run", or "global pass" to hold it in a pass before the merge.
    """
    process = Forked(_HOLD + program, stage, before, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(reached: Callable[[], bool], process: Forked) -> None:
    """Wait until a process that does not end has come so far."""
    while not reached():
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        time.sleep(0.001)


def journaled(journal: Path, items: int) -> bool:
    """Whether so many items are finished; the first line of a journal is none."""
    return journal.exists() and journal.read_bytes().count(b"\n") > items
