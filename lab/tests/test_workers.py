"""Worker processes do not outlive the run that they work for."""

import signal
import subprocess
import sys
import time

import psutil

RUN = """
import os, sys, time
from functools import partial
from rich.console import Console
from covmerge_lab.workers import Workers


def work(on_progress):
    print(os.getpid(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    with Workers(Console(file=sys.stderr)) as workers:
        workers.run({"long": work})
"""


def test_workers_end_with_a_killed_run(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        started = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGKILL)
    give_up = time.monotonic() + 60
    while any(own.is_running() and own.status() != psutil.STATUS_ZOMBIE for own in started):
        assert time.monotonic() < give_up, "a process goes on without its run"
        time.sleep(0.1)
