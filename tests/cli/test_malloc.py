"""Memory freed between the steps of a merge is not cleared by the system again and again."""

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import ctypes
import resource
import numpy
from covmerge.front.cli import keep_freed_memory
keep_freed_memory()
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, which would come by one fault for many
def step():
    blocks = [numpy.ones(2**20, numpy.float32) for _ in range(8)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults * resource.getpagesize() / (20 * 8 * 2**22))
"""
# Every block is mapped by itself and given back at once.
GIVEN_BACK = {"MALLOC_TRIM_THRESHOLD_": str(2**17), "MALLOC_MMAP_THRESHOLD_": str(2**17)}


def cleared(environment):
    """Share of the memory asked for that the system had to clear."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_blocks_are_used_again():
    assert cleared({}) < 0.1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_the_environment_has_the_last_word():
    assert cleared(GIVEN_BACK) > 0.9
