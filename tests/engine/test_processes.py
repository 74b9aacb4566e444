"""The executor of processes: the same bytes as threads, whatever becomes of its workers."""

import os
import random
import re
import signal
import threading
import time

import psutil
import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import InputError, ResourceError, TensorError
from covmerge.plan.planning.build import build_plans
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine import budget
from covmerge.run.engine.budget import plan_memory
from covmerge.run.engine.processes import Processes
from covmerge.run.sources import open_checkpoints
from tests.advised import advice
from tests.e2e.test_resume import save_plain
from tests.folders import contents
from tests.forked import Forked, fork_workers, printed, run
from tests.held import COMMAND_LINE, held, journaled, wait_until

# What a user is told whose workers die more than once: where, and by what.
TWICE = r"two worker processes ended (over 'layers|while they handed over what they had counted)"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return folder, *save_plain(folder, layers=12, width=64)


@pytest.mark.slow
def test_the_same_bytes_as_threads(plain, tmp_path):
    _, base, experts = plain
    for workers in (1, 2):
        covmerge.merge(base, experts, "ties", tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.slow
def test_the_same_bytes_as_threads_of_many_methods(plain, tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    _, base, experts = plain
    methods = ["ace", "emr", "dare_ties"]
    for workers in (1, 3):
        covmerge.compare(base, experts, methods, tmp_path / str(workers), workers=workers)
    for method in methods:
        one, three = (contents(tmp_path / workers / method) for workers in "13")
        assert one == three


class Order:
    """Notes what was done, in that order."""

    def __init__(self):
        self.done = []

    def start(self, total):
        pass

    def advance(self, what, size, *, resumed=False):
        self.done.append(what)

    def finish(self):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("hands", [1, 2])
def test_the_largest_items_are_begun_first(hands, tmp_path, monkeypatch):
    """So no small one is done before a large one, as each of two workers begins with one."""
    fork_workers(monkeypatch)
    monkeypatch.setattr(budget, "_hands", lambda device: hands)
    base = {f"layers.{n}.proj.weight": torch.randn(16, 16) for n in range(20)}
    large = [f"layers.{n}.proj.weight" for n in (20, 21)]
    base |= {name: torch.randn(512, 512) for name in large}
    save_file(base, tmp_path / "base.safetensors")
    expert = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in base.items()}
    save_file(expert, tmp_path / "expert.safetensors")
    given = (tmp_path / "base.safetensors", [tmp_path / "expert.safetensors"], "ace")
    order = Order()
    covmerge.merge(*given, tmp_path / "out", workers=2, progress=order)
    assert order.done[0] in large and len(order.done) == 22
    covmerge.merge(*given, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("hands", [1, 2])
@pytest.mark.parametrize("method", ["ace", "ties"])
def test_workers_that_are_killed_at_random(plain, tmp_path, monkeypatch, method, hands):
    """Ten times each: kills of which every one must do no harm, whatever each had in hand."""
    fork_workers(monkeypatch)
    monkeypatch.setattr(budget, "_hands", lambda device: hands)
    _, base, experts = plain
    covmerge.merge(base, experts, method, tmp_path / "whole")
    rng = random.Random(0)
    started, killed = [], []
    start = Processes._start

    def noted(self, device):
        worker = start(self, device)
        started.append(worker.process.pid)
        return worker

    def killer(until):
        while not until.is_set() and len(killed) < 10:
            time.sleep(rng.uniform(0.01, 0.5))
            alive = [pid for pid in started if pid not in killed and psutil.pid_exists(pid)]
            if alive:
                killed.append(rng.choice(alive))
                os.kill(killed[-1], signal.SIGKILL)

    monkeypatch.setattr(Processes, "_start", noted)
    tries = 0
    while len(killed) < 10:
        until = threading.Event()
        thread = threading.Thread(target=killer, args=(until,))
        thread.start()
        out = tmp_path / f"killed{tries}"
        try:
            covmerge.merge(base, experts, method, out, workers=2)
            assert contents(out) == contents(tmp_path / "whole")
        except ResourceError as error:
            assert re.match(TWICE, str(error)), error
            assert "SIGKILL" in str(error)
            assert not out.exists()
        finally:
            until.set()
            thread.join()
        tries += 1
    assert not any(psutil.pid_exists(pid) for pid in started)


@pytest.mark.slow
def test_a_killed_merge_of_processes_is_resumed_by_threads(plain, tmp_path):
    _, base, experts = plain
    covmerge.merge(base, experts, "ace", tmp_path / "whole")
    sources = [f"--expert={name}={path}" for name, path in experts.items()]
    given = ["merge", "--base", base, *sources, "--method=ace", "--workers=2", tmp_path / "out"]
    journal = tmp_path / ".out.covmerge-partial" / "journal.jsonl"
    with held(COMMAND_LINE, *given, before="nothing") as process:
        wait_until(lambda: journaled(journal, 2), process)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    psutil.wait_procs(workers, timeout=60)
    assert not any(worker.is_running() for worker in workers)
    result = covmerge.merge(base, experts, "ace", tmp_path / "out", resume=True)
    assert result.run["resumed_items"] >= 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_an_error_in_a_worker_ends_the_merge(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    tensors = {f"layers.{n}.mlp.up_proj.weight": torch.full((8, 8), 1.0) for n in range(3)}
    save_file(tensors, tmp_path / "base.safetensors")
    bad = {name: 1.1 * tensor for name, tensor in tensors.items()}
    bad["layers.1.mlp.up_proj.weight"][2, 3] = float("nan")
    save_file(bad, tmp_path / "bad.safetensors")
    with pytest.raises(TensorError, match=r"layers\.1.*first at \[2, 3\]"):
        covmerge.merge(
            tmp_path / "base.safetensors",
            [tmp_path / "bad.safetensors"],
            "average",
            tmp_path / "out",
            workers=2,
        )
    assert not (tmp_path / "out").exists()


def test_tensors_in_memory_are_refused(tmp_path):
    base = {"fc.weight": torch.eye(4)}
    with pytest.raises(InputError, match="base is a state dict"):
        covmerge.merge(base, [base], "average", tmp_path / "out", workers=2)


def test_memory_of_all_workers_together(plain):
    _, base, experts = plain
    given = {"base": str(base), "experts": {n: str(p) for n, p in experts.items()}, "method": "ace"}
    with open_checkpoints(base, experts, {}) as opened:
        (plan,) = build_plans([parse_recipe(given)], opened.base, opened.experts)
    cpu = torch.device("cpu")
    three = plan_memory([plan], None, device=cpu, workers=3)
    assert three.workers == 3
    fewer = plan_memory([plan], three.peak - 1, device=cpu, workers=3)
    assert fewer.workers == 2 and fewer.peak < three.peak
    with pytest.raises(ResourceError, match="leave out workers"):
        plan_memory([plan], fewer.resident * 2, device=cpu, workers=3)


# As `python script.py` does it; its workers are started as ever, and import the script.
SCRIPT = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(plain, tmp_path):
    _, base, experts = plain
    script = tmp_path / "script.py"
    given = f"{str(base)!r}, { {name: str(path) for name, path in experts.items()}!r}"
    script.write_text(f"import covmerge\ncovmerge.merge({given}, 'ties', 'out', workers=2)\n")
    done = run(SCRIPT, script, cwd=tmp_path)
    assert done.returncode != 0 and "InputError" in done.stderr
    said = advice(
        "which is a file, does it under `if __name__ == '__main__':`; or leave out the work"
    )
    assert re.search(said, done.stderr.splitlines()[-1])
    assert list(tmp_path.iterdir()) == [script]
    text = script.read_text()
    guarded = text.replace("covmerge.merge", "if __name__ == '__main__':\n    covmerge.merge")
    script.write_text(guarded)
    printed(SCRIPT, script, cwd=tmp_path)
    printed(text.replace(", workers=2", ", overwrite=True"), cwd=tmp_path)


@pytest.mark.slow
def test_a_worker_that_dies_when_all_is_counted_is_counted_once(plain, tmp_path, monkeypatch):
    """One that has nothing left to do is missed only when its counters are asked for."""
    fork_workers(monkeypatch)
    _, base, experts = plain
    covmerge.merge(base, experts, "ties", tmp_path / "whole")
    collect, killed = Processes._collect, []

    def kill_the_last(self, *given):
        if not killed:
            killed.append(self._workers[-1].process)
            killed[0].kill()
            killed[0].join()
        collect(self, *given)

    monkeypatch.setattr(Processes, "_collect", kill_the_last)
    covmerge.merge(base, experts, "ties", tmp_path / "killed", workers=2)
    assert killed
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_workers_that_die_whenever_they_hand_over_end_the_merge(plain, tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    _, base, experts = plain
    collect = Processes._collect

    def kill_one(self, *given):
        self._workers[-1].process.kill()
        self._workers[-1].process.join()
        collect(self, *given)

    monkeypatch.setattr(Processes, "_collect", kill_one)
    said = advice(
        "while they handed over what they had counted (the last by {}): is the memory used"
    )
    with pytest.raises(ResourceError, match=said):
        covmerge.merge(base, experts, "ties", tmp_path / "never", workers=2)
    assert not (tmp_path / "never").exists()
    covmerge.merge(base, experts, "ties", tmp_path / "never", workers=1)


_LONG_BATCH = """
import sys, time
from multiprocessing import get_context
from pathlib import Path
import torch
from covmerge.base.settings import caller_now
from covmerge.run.engine.processes import _serve

def compute():
    Path(sys.argv[2]).touch()
    time.sleep(600)

_, theirs = get_context("fork").Pipe()
given = (theirs, compute, torch.device("cpu"), 1, sys.argv[1], None, caller_now())
get_context("fork").Process(target=_serve, args=given).start()
time.sleep(600)
"""


def test_a_worker_whose_parent_is_killed_ends_within_a_batch(tmp_path):
    """It computed on, and wrote its batch into the files of the merge that was begun meanwhile."""
    shared = tmp_path / "shared"
    shared.mkdir()
    process = Forked(_LONG_BATCH, shared / "alone", tmp_path / "computing")
    wait_until((tmp_path / "computing").exists, process)
    (worker,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert not psutil.wait_procs([worker], timeout=60)[1]
    assert not shared.exists()  # the parent's temporary folder, which it cannot remove any more
