"""Threads under a limit of address space that leaves room for a stack and little else."""

import subprocess
import sys
import threading
import weakref

import pytest

from covmerge.base.threads import ThreadPool

# In a process of its own, as the room that is left hangs on what the process has mapped.
TRIAL = """
import os, resource, signal, threading, time
from covmerge.base.threads import ThreadPool, start

def stack(): return resource.getrlimit(resource.RLIMIT_STACK)[0]

def pool():
    with ThreadPool(1) as threads:
        threads.submit(time.sleep, 0)

def trial(extra):
    if not (child := os.fork()):
        signal.alarm(20)  # what waits for ever is ended by it
        taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + stack() + extra, -1))
        try:
            {start}
        except RuntimeError as error:
            os._exit(1 if "start new thread" in str(error) else 3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

resource.setrlimit(resource.RLIMIT_STACK, (8 * 2**20, -1))
print({{trial(extra) for extra in range(0, 2**16, 4096)}}, trial(2**30))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what a process has mapped")
@pytest.mark.parametrize(
    "start", ["start(threading.Thread(target=time.sleep, args=(0,)))", "pool()"]
)
def test_a_thread_starts_or_says_that_it_cannot(start):
    ran = subprocess.run(
        [sys.executable, "-c", TRIAL.format(start=start)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.stdout == "{1} 0\n", ran.stderr


def test_a_pool_that_nobody_has_any_more_ends_its_threads():
    pool = ThreadPool(1, "alone")
    pool.submit(int).result()
    (thread,) = (one for one in threading.enumerate() if one.name.startswith("alone"))
    kept = weakref.ref(pool)
    del pool
    assert kept() is None
    thread.join(10)
    assert not thread.is_alive()
