"""What memory there is for a process: the machine's, a container's, a Slurm job's."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from covmerge.base import memory
from covmerge.base.memory import MACHINE, HeapTrimmer, free_memory
from tests.forked import printed

GIB = 2**30
NOTHING = {}


def put(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def stat(prefix=""):
    return f"anon 5\n{prefix}inactive_file {2**20}\n{prefix}active_file {2**20}\nslab 7"


def test_where_nothing_else_is_said_it_is_the_machines(tmp_path):
    assert free_memory(root=tmp_path, environment=NOTHING).whose == MACHINE


def test_the_tightest_of_nested_groups_counts_and_pages_of_files_are_free(tmp_path):
    put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/pod/main",
            "sys/fs/cgroup/pods/pod/main/memory.max": "max",
            "sys/fs/cgroup/pods/pod/main/memory.current": 5,
            "sys/fs/cgroup/pods/pod/memory.max": 2**30,
            "sys/fs/cgroup/pods/pod/memory.current": 2**29,
            "sys/fs/cgroup/pods/pod/memory.stat": stat(),
            "sys/fs/cgroup/pods/memory.max": 2**40,
            "sys/fs/cgroup/pods/memory.current": 2**30,
        },
    )
    found = free_memory(root=tmp_path, environment=NOTHING)
    assert found.size == GIB // 2 + 2**21
    assert str(tmp_path / "sys/fs/cgroup/pods/pod/memory.max") in found.whose
    assert free_memory(4, root=tmp_path, environment=NOTHING).size == found.size // 4


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("4:memory:/docker/abc", "docker/abc"),
        ("4:cpu,memory:/docker/abc", ""),  # in the container the mount is its own group
        ("4:memory:/../other", ""),
    ],
)
def test_the_first_version_of_cgroups(line, folder, tmp_path):
    group = Path("sys/fs/cgroup/memory") / folder
    put(
        tmp_path,
        {
            "proc/self/cgroup": f"2:cpuset:/\n{line}\n0::/",
            str(group / "memory.limit_in_bytes"): GIB,
            str(group / "memory.usage_in_bytes"): GIB // 4,
            str(group / "memory.stat"): stat("total_"),
        },
    )
    found = free_memory(root=tmp_path, environment=NOTHING)
    assert found.size == GIB - GIB // 4 + 2**21
    assert str(group) in found.whose


def test_a_group_that_took_more_than_it_may_has_nothing_free(tmp_path):
    put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 1000,
            "sys/fs/cgroup/memory.current": 2000,
        },
    )
    assert free_memory(root=tmp_path, environment=NOTHING).size == 0


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({"SLURM_MEM_PER_NODE": "4096"}, 4 * GIB),
        ({"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "3"}, 3 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # all of the node's
        ({"SLURM_MEM_PER_CPU": "1024"}, None),
        ({"SLURM_MEM_PER_NODE": "4G"}, None),
    ],
)
def test_what_slurm_gave_the_job(environment, size, tmp_path):
    found = free_memory(root=tmp_path, environment=environment)
    if size is None:
        assert "Slurm" not in found.whose
        return
    assert "Slurm" in found.whose
    # What two ranks have taken is of the same limit.
    mine = psutil.Process().memory_info().rss
    free = free_memory(2, root=tmp_path, environment=environment).size
    assert abs(free - max(0, size // 2 - mine)) < 2**26


ODD = {
    "proc/self/cgroup": (b"\n0::/\n", b"0:memory\n", b"0::/\xff\xfe\n", b"0::/a\0b\n", b""),
    "sys/fs/cgroup/memory.max": (b"9" * 5000, b"\xff", "١٢٣".encode(), b"-5", b"1e9", b""),
    "sys/fs/cgroup/memory.current": (b"9" * 5000, b"-1", b"x"),
    "sys/fs/cgroup/memory.stat": (
        *(b"\n", b"inactive_file\n", b"inactive_file abc\n", b"\xff\n"),
        *(b"inactive_file 9999999999999999999\n", b"inactive_file -999999999\n"),
    ),
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, of in ODD.items() for content in of]
)
def test_what_cannot_be_read_says_nothing(name, content, tmp_path):
    put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.current": 0,
        },
    )
    (tmp_path / name).write_bytes(content)
    free = free_memory(root=tmp_path, environment=NOTHING)
    assert 0 <= free.size <= psutil.virtual_memory().total
    if name.endswith("stat"):
        assert free.size == GIB
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert free_memory(root=tmp_path, environment=NOTHING).size > 0


def _new_group():
    """Make a cgroup below this process's own, if this machine lets it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / path.lstrip(
                "/"
            ) / "covmerge-test", "limit_in_bytes"
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup/covmerge-test"), "max"
    return None, ""


MERGE = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from covmerge.base.memory import free_memory
print(free_memory().size, free_memory().whose, sep="\\n")
"""


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="no Linux")
def test_a_real_group(tmp_path):
    folder, limit = _new_group()
    try:
        folder.mkdir()
        (folder / f"memory.{limit}").write_text(str(GIB))
    except (AttributeError, OSError) as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        out = subprocess.run(
            [sys.executable, "-c", MERGE, str(folder)],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ),
        )
    finally:
        with suppress(OSError):
            folder.rmdir()
    free, whose = out.stdout.splitlines()
    assert GIB // 2 < int(free) < GIB
    assert str(folder) in whose


HOLES = """
import psutil
from covmerge.base.memory import HeapTrimmer

def held():
    return psutil.Process().memory_info().rss

blocks = [bytearray(b"x") * 100_000 for _ in range(3000)]
found = [held()]
del blocks[:-1]  # the last one keeps the heap's end where it is
for most in (None, 2 * found[0], found[0] // 4):
    HeapTrimmer(most).trim()
    found.append(held())
print(found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what glibc keeps")
def test_malloc_gives_back_what_it_keeps_once_a_process_holds_more_than_it_should():
    full, any_number, less_than_the_most, more = json.loads(printed(HOLES))
    assert full - more > 200e6
    assert min(any_number, less_than_the_most) - more > 200e6


def test_what_cannot_be_given_back_is_not_tried_at_every_look(monkeypatch):
    tried = []
    monkeypatch.setattr(memory, "give_back", lambda: tried.append(1))
    trimmer = HeapTrimmer(1)
    for _ in range(5):
        trimmer.trim()
    assert len(tried) == 1
