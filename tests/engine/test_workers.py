"""How many processes `--workers auto` chooses, and that they do not multiply the cores."""

import pytest
import torch

import covmerge
from covmerge.errors import InputError
from covmerge.plan.planning.build import build_plans
from covmerge.plan.planning.work import WorkItem
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine import options as choosing
from covmerge.run.engine.executor import Task
from covmerge.run.engine.layer import Context
from covmerge.run.engine.options import RunOptions, choose_workers
from covmerge.run.engine.outputs import NoOutput
from covmerge.run.engine.thread_count import usable_cores
from covmerge.run.engine.threads import Threads
from covmerge.run.sources import open_checkpoints
from tests.cli.runs import covmerge as command
from tests.e2e.test_resume import save_plain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain"), layers=4, width=64)


@pytest.fixture(scope="module")
def plan(plain):
    base, experts = plain
    given = {"base": str(base), "experts": {n: str(p) for n, p in experts.items()}, "method": "ace"}
    with open_checkpoints(base, experts, {}) as opened:
        yield build_plans([parse_recipe(given)], opened.base, opened.experts)[0]


def test_small_work_stays_in_one_process(plan):
    number, why = chosen = choose_workers([plan], device=CPU, threads=8, cores=8)
    assert number == 1 and "processes take seconds to start" in why
    assert choose_workers([plan], device=CUDA, threads=8, cores=8, gpus=8) == chosen


@pytest.mark.parametrize(
    "given, workers, why",
    [
        ({"threads": 8, "cores": 8}, 4, "8 cores"),  # no more than there are items
        ({"threads": 1, "cores": 3}, 3, "3 cores"),
        ({"threads": 1, "cores": 1}, 1, "there is one core"),
        ({"threads": 8, "cores": 8, "in_memory": True}, 1, "stays in this process"),
        ({"threads": 8, "cores": 8, "device": torch.device("meta")}, 1, "runs on meta"),
        ({"threads": 1, "cores": 8, "device": CUDA, "gpus": 0}, 1, "runs on cuda"),
        ({"threads": 1, "cores": 8, "device": CUDA, "gpus": 1}, 1, "one process keeps busy"),
        ({"threads": 8, "cores": 1, "device": CUDA, "gpus": 3}, 3, "3 GPUs, a process for each"),
        ({"threads": 1, "cores": 8, "device": CUDA, "gpus": 8}, 4, "8 GPUs"),  # of four items
    ],
)
def test_large_work_is_shared_where_that_helps(plan, monkeypatch, given, workers, why):
    monkeypatch.setattr(choosing, "_SMALL", 1)
    number, said = choose_workers([plan], **{"device": CPU, **given})
    assert (number, why in said) == (workers, True), said


def test_large_matrices_stay_in_one_process(plan, monkeypatch):
    monkeypatch.setattr(choosing, "_SMALL", 1)
    monkeypatch.setattr(WorkItem, "is_narrow", lambda self, device: False)
    number, why = choose_workers([plan], device=CPU, threads=8, cores=8)
    assert number == 1 and "each take all cores" in why
    assert choose_workers([plan], device=CPU, threads=2, cores=8)[0] == 4


def test_the_memory_has_its_say(plan, monkeypatch):
    monkeypatch.setattr(choosing, "_SMALL", 1)
    monkeypatch.setattr(choosing, "usable_cores", lambda: 4)
    options = RunOptions(workers="auto", threads=1)
    assert options.memory([plan]).workers == 4
    one = RunOptions(threads=1).memory([plan])
    little = RunOptions(workers="auto", threads=1, max_memory=one.peak).memory([plan])
    assert (little.workers, little.why) == (1, "the memory holds no more than one process")
    some = RunOptions(workers="auto", threads=1, max_memory=3 * one.resident + 2**28)
    assert some.memory([plan]).why.endswith("the memory holds no more")


def test_the_choice_is_told_and_not_recorded(plain, tmp_path):
    result = covmerge.merge(*plain, "ace", tmp_path / "out", workers="auto")
    assert result.run["workers"] == 1
    assert "are soon read" in result.run["workers_because"]
    assert "soon read" not in (tmp_path / "out" / "covmerge.json").read_text()


@pytest.mark.parametrize("workers", [None, 0, -1, 2.5, True, "many"])
def test_workers_that_are_no_number_of_processes(plain, tmp_path, workers):
    with pytest.raises(
        InputError, match=r"workers: .* is neither a number of processes nor 'auto'"
    ):
        covmerge.merge(*plain, "average", tmp_path / "out", workers=workers)
    assert not any(tmp_path.iterdir())


def test_on_the_command_line(plain, tmp_path):
    base, experts = plain
    sources = [f"--expert={name}={path}" for name, path in experts.items()]
    given = ["merge", "--base", base, *sources, "--method=ace", "--dry-run"]
    assert command(*given, "--workers=auto", "--json").json["memory"]["workers_because"]
    wrong = command(*given, "--workers=0", code=2).stderr
    assert "--workers: 0 is neither a number of processes nor 'auto'" in wrong
    assert usable_cores() >= 1


def test_what_takes_all_cores_is_computed_alone(plain, plan, monkeypatch):
    entered = []

    class Alone:
        def __enter__(self):
            entered.append(torch.get_num_threads())

        def __exit__(self, *_):
            pass

    base, experts = plain
    before = torch.get_num_threads()
    with open_checkpoints(base, experts, {}) as opened:
        task = Task(opened.sources(), Context(torch.float32, CPU, ({},)), (NoOutput(),))
        torch.set_num_threads(2)
        inner, batches = Threads(in_flight=2**20, lanes=1), [(0, (plan.items[0],))]
        with inner.running(batches, task, Alone()) as finished:
            assert len(list(finished)) == 1
        assert entered == []
        monkeypatch.setattr(WorkItem, "is_narrow", lambda self, device: False)
        with inner.running(batches, task, Alone()) as finished:
            assert len(list(finished)) == 1
    torch.set_num_threads(before)
    assert entered == [2]
