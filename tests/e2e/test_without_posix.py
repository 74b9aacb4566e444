"""Merges where Python has none of what Windows has not, and the same bytes."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.adapters import patterns
from covmerge.files.adapters.patterns import Patterns
from tests.e2e.test_resume import save_plain
from tests.folders import contents
from tests.forked import run

# numpy, torch and psutil are those of this system, and know it, as shutil.disk_usage does (os.statvfs).
WITHOUT = """
import os, sys
import numpy, psutil, torch

absent = {"fcntl", "grp", "nis", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}
calls = '''chown chroot ctermid fchdir fchmod fchown fork forkpty getegid geteuid getgid getgroups
    getloadavg getpgid getpgrp getpriority getsid getuid initgroups killpg lchown lockf major minor mkfifo
    mknod nice pathconf posix_fadvise posix_fallocate posix_spawn pread preadv pwrite pwritev readv
    sched_getaffinity sched_yield sendfile setpriority setsid setuid sync sysconf tcgetpgrp ttyname
    uname wait3 wait4 writev O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC'''

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in absent & sys.modules.keys():
    del sys.modules[name]
sys.meta_path.insert(0, Absent())
for name in calls.split():
    if hasattr(os, name):
        delattr(os, name)
"""

MERGE = """
import json, os, signal, sys
import covmerge
import covmerge.front.cli
from covmerge.errors import InputError

given, kill = json.loads(sys.argv[1]), int(sys.argv[2])

class Killed:
    left = kill
    def start(self, total): ...
    def finish(self): ...
    def advance(self, what, size, *, resumed=False):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

if not kill:  # another was killed before
    try:
        covmerge.merge(**given, threads=1)
    except InputError as refused:
        print(refused, file=sys.stderr)
result = covmerge.merge(**given, threads=1, progress=Killed(), resume=not kill)
verified = covmerge.verify(result.path)
seen = covmerge.inspect(given["base"], given["experts"], threads=1).as_json()["layers"]
print(json.dumps([verified.ok, list(result.notes), seen]))
"""


def adapters(folder: Path) -> dict[str, str]:
    """A base, and two adapters whose ranks go by patterns."""
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{n}.self_attn.{side}_proj" for n in range(2) for side in "qv"]
    base = {f"{name}.weight": torch.randn(24, 24, generator=generator) for name in names}
    save_file(base, folder / "base.safetensors")
    paths = {"base": str(folder / "base.safetensors")}
    for expert in ("a", "b"):
        factors = {}
        for name in names:
            rank = 2 if "layers.1" in name else 4
            for side, shape in (("A", (rank, 24)), ("B", (24, rank))):
                key = f"base_model.model.{name}.lora_{side}.weight"
                factors[key] = torch.randn(shape, generator=generator)
        paths[expert] = str(folder / expert)
        (folder / expert).mkdir()
        save_file(factors, folder / expert / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": r".*\.[qv]_proj"}
        config["rank_pattern"] = {r"model\.layers\.1\..*": 2}
        (folder / expert / "adapter_config.json").write_text(json.dumps(config))
    return paths


def merge(folder: Path, inputs: dict[str, object], kill: int = 0):
    given = {**inputs, "out": str(folder / "out")}
    return run(WITHOUT + MERGE, json.dumps(given), kill, anew=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["models", "adapters"])
def test_a_merge_that_is_killed_and_resumed(tmp_path: Path, kind: str) -> None:
    if kind == "models":
        base, experts = save_plain(tmp_path, layers=6, width=32)
        inputs = {"base": str(base), "experts": {n: str(p) for n, p in experts.items()}}
    else:
        paths = adapters(tmp_path)
        inputs = {"base": paths["base"], "experts": {n: paths[n] for n in "ab"}}
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    covmerge.merge(**inputs, out=tmp_path / "with" / "out", threads=1)
    expected = covmerge.inspect(**inputs, threads=1).as_json()["layers"]

    folder = tmp_path / "without"
    killed = merge(folder, inputs, kill=3)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (folder / "out").exists()
    resumed = merge(folder, inputs)
    assert resumed.returncode == 0, resumed.stderr
    assert "pass resume=True to go on" in resumed.stderr
    ok, notes, seen = json.loads(resumed.stdout)
    assert ok and seen == json.loads(json.dumps(expected)) != []
    assert "has no locks" in " ".join(notes)  # of this Python; Windows has its own
    assert contents(folder / "out") == contents(tmp_path / "with" / "out")
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_no_link_is_followed_without_the_flag_for_it(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to("precious")
    program = WITHOUT + (
        "from pathlib import Path\n"
        "from covmerge.files.stores.regular_file import open_descriptor\n"
        "open_descriptor(Path(sys.argv[1]), os.O_WRONLY | os.O_TRUNC)\n"
    )
    assert "Too many levels of symbolic links" in run(program, tmp_path / "link").stderr
    assert (tmp_path / "precious").read_text() == "precious"
    assert run(program, tmp_path / "precious").returncode == 0


def test_patterns_without_limits_are_waited_for_so_long_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys, runpy; sys.modules['resource'] = None; del sys.argv[0]; "
    script += "runpy.run_path(sys.argv[0], run_name='__main__')"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" -c "{script}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(patterns.sys, "executable", str(python))
    assert Patterns("here", {"f": (["(?:a)b"], False)}).first("f", "abc") == (0, None)
    monkeypatch.setattr(patterns, "_WAIT_SECONDS", 2.0)
    forever = Patterns("here", {"f": (["(.*.*.*.*.*.*.*.*.*.*)x"], True)})
    with pytest.raises(CheckpointError, match="takes more than"):
        forever.first("f", "model.layers.0.self_attn.some_rather_long_name_of_a_module.q_proj")
