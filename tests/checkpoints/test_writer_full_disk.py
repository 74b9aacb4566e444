"""A disk that is really full: a small file system, mounted where only the child process sees it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, resource, sys
from pathlib import Path

import torch

from covmerge.files.checkpoints.journal import Entry, Journal
from covmerge.files.checkpoints.layout import plan_layout
from covmerge.files.checkpoints.writer import ShardWriter
from covmerge.errors import ResourceError
from covmerge.run.export.files import write_manifest
from covmerge.files.stores.local import LocalFolder
from covmerge.base.types import TensorHeader

folder = Path(sys.argv[1])
headers = [TensorHeader(name, (100, 1000), torch.float32) for name in "abc"]
layout = plan_layout(headers, 400_000)

def refused(work):
    try:
        work()
    except ResourceError as error:
        return str(error)
    raise SystemExit("was not refused")

# Room for two shards of three: what was created is removed again.
message = refused(lambda: ShardWriter(folder, layout))
assert "model-00003-of-00003.safetensors" in message, message
assert f"{layout.shards[2].size} bytes needed" in message, message
assert "bytes free (No space left on device)" in message, message
assert list(folder.iterdir()) == []

# A file system that cannot reserve: the write itself is refused.
fallocate, os.posix_fallocate = os.posix_fallocate, lambda *_: (_ for _ in ()).throw(OSError(95, ""))
writer = ShardWriter(folder, layout)
checksums = {name: writer.write(name, torch.ones(100, 1000)) for name in "ab"}
assert "no room for" in refused(lambda: writer.write("c", torch.ones(100, 1000)))
assert {name: writer.read_back(name) for name in "ab"} == checksums
os.posix_fallocate = fallocate

# A journal is as it was before the line that did not fit.
(folder / "model-00003-of-00003.safetensors").unlink()
journal = Journal.create(folder / "journal", "plan")
entry = Entry("t", (0, 1), "c" * 32, {"note": "x" * 1000})
with open(folder / "filler", "wb") as filler:
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filler.write(b"x" * (free - 4096))
lines = 0
def fill():
    global lines
    while True:
        journal.append(Entry(f"t{lines}", (0, 1), "c" * 32, {"note": "x" * 1000}))
        lines += 1
assert "journal" in refused(fill)
assert lines > 0
content = (folder / "journal").read_bytes()
assert content.endswith(b"}\\n") and content.count(b"\\n") == lines + 1
assert "covmerge.json" in refused(lambda: write_manifest(LocalFolder(folder), {"note": "x" * 9000}))
(folder / "filler").unlink()
journal.append(entry)
assert len(Journal.resume(folder / "journal", "plan").finished) == lines + 1

# A limit on the size of files.
for path in folder.iterdir():
    path.unlink()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
assert "smaller shard size" in refused(lambda: ShardWriter(folder, layout))
assert list(folder.iterdir()) == []
print("passed")
"""


def test_a_full_disk_is_named_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("a private mount needs Linux and unshare")
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none "$1" && shift && "$@"']
    can = subprocess.run([*mount, "sh", tmp_path, "true"], capture_output=True, text=True)
    if can.returncode != 0:
        pytest.skip(f"no small file system can be mounted: {can.stderr.strip()}")
    child = subprocess.run(
        [*mount, "sh", tmp_path, sys.executable, "-c", SCRIPT, tmp_path],
        capture_output=True,
        text=True,
    )
    assert child.stdout == "passed\n", child.stderr
