"""Which device each process computes on, without any."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.errors import InputError, ResourceError
from covmerge.maths.layer import Method
from covmerge.plan.planning.build import build_plans
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine import options as of_runs
from covmerge.run.engine.devices import _BESIDE, check_room, own_device, usable_device
from covmerge.run.engine.executor import Task
from covmerge.run.engine.executors import run_options
from covmerge.run.engine.layer import Context
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.outputs import NoOutput
from covmerge.run.engine.processes import Processes
from covmerge.run.engine.ranks.rank import find_rank
from covmerge.run.engine.threads import Threads
from covmerge.run.sources import open_checkpoints
from tests.cli.runs import covmerge as command
from tests.e2e.test_resume import save_plain
from tests.forked import fork_workers

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain"), layers=4, width=64)


@pytest.mark.parametrize("name", ["cpuu", "cuda:-3", "meta:x"])
def test_what_is_no_device(name):
    on_ray = {"executor": "ray", "address": "auto"}
    for use in (usable_device, lambda name: run_options({**on_ray, "device": name})):
        with pytest.raises(InputError, match=f'device="{name}" cannot be used here: '):
            use(name)


@no_gpu
def test_who_gives_out_tasks_needs_no_gpu_of_its_own(plain):
    options = run_options({"device": "cuda", "executor": "ray", "address": "auto"})
    assert options.torch_device == torch.device("cuda")
    base, experts = plain
    sources = [f"--expert={name}={path}" for name, path in experts.items()]
    given = ["merge", "--base", base, *sources, "--method=ace", "--dry-run", "--device=cuda"]
    assert "--device cuda cannot be used here" in command(*given, code=2).stderr
    assert command(*given, "--executor=ray", "--address=auto", "--json").json["estimate"]


@pytest.mark.parametrize(
    "environment, gpus, taken",
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 4, "cuda:1"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, 2, "cuda:1"),
        ({"RANK": "2", "WORLD_SIZE": "4"}, 4, "cuda:2"),  # a loop on one machine
        ({"SLURM_PROCID": "6", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}, 4, "cuda:2"),
        # srun --gpus-per-task=1 leaves each task its own: CUDA_VISIBLE_DEVICES
        ({"SLURM_PROCID": "6", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}, 1, "cuda:0"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_place(environment, gpus, taken, monkeypatch):
    rank = find_rank(environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert str(own_device("cuda", rank.place)) == taken
    monkeypatch.setattr(of_runs, "usable_device", torch.device)
    assert str(RunOptions(device="cuda", rank=rank).torch_device) == taken
    for named in ("cuda:1", "cpu"):
        assert str(RunOptions(device=named, rank=rank).torch_device) == named


def plan_of(plain, **more):
    base, experts = plain
    named = {name: str(path) for name, path in experts.items()}
    given = {"base": str(base), "experts": named, "method": "ace", **more}
    with open_checkpoints(base, experts, {}) as opened:
        return build_plans([parse_recipe(given)], opened.base, opened.experts)[0]


def test_each_worker_takes_a_gpu(plain, monkeypatch):
    plan = plan_of(plain)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**36))
    monkeypatch.setattr(of_runs, "usable_device", torch.device)
    monkeypatch.setattr(of_runs, "_SMALL", 1)

    def devices(**given):
        options = RunOptions(device=given.pop("device", "cuda"), **given)
        with closing(options.executor(options.memory([plan]), lambda: None)) as executor:
            return list(map(str, executor._devices)) if isinstance(executor, Processes) else None

    assert devices() is None
    assert devices(workers="auto") == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices(workers=4) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert devices(workers="auto", device="cuda:1") is None
    assert devices(workers=2, device="cuda:1") == ["cuda:1", "cuda:1"]
    assert devices(workers=2, device="cpu") == ["cpu", "cpu"]
    # Of two ranks of a machine each has a part of its GPUs.
    second = find_rank({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert devices(workers=2, rank=second) == ["cuda:2", "cuda:0"]
    assert devices(workers="auto", rank=second) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices(workers="auto", rank=second) == ["cuda:2", "cuda:3"]


@no_gpu
@pytest.mark.slow
def test_a_worker_computes_on_its_own_device(plain, monkeypatch):
    """Not on that of whoever started it; where there is none it says so."""
    fork_workers(monkeypatch)
    plan, (base, experts) = plan_of(plain), plain
    batches = [(index, (item,)) for index, item in enumerate(plan.items)]
    with open_checkpoints(base, experts, {}) as opened:
        there = Context(torch.float32, torch.device("cuda"), ({},))
        task = Task(opened.sources(), there, (NoOutput(),))
        inner = Threads(in_flight=2**20, lanes=1)
        with closing(Processes([torch.device("cpu")], opened.opener([plan]), inner)) as executor:
            assert len(list(executor.run(batches, task))) == len(batches)
        executor = Processes([torch.device("cuda", 1)], opened.opener([plan]), inner)
        with pytest.raises(InputError, match='device="cuda:1" cannot be used here: '):
            list(executor.run(batches, task))
    assert executor._workers == []  # it is closed


def test_what_has_no_room_on_the_device_is_refused_by_name(plain):
    plan, cuda = plan_of(plain), torch.device("cuda:1")
    batches = [(item,) for item in plan.items]
    largest = plan.peak_item
    needed = largest.device_memory
    check_room(batches, cuda, free=needed + _BESIDE)
    check_room(batches, cuda, free=2 * (needed + _BESIDE), processes=2)
    with pytest.raises(ResourceError) as refused:
        check_room(batches, cuda, free=needed + _BESIDE - 1)
    assert str(refused.value).startswith(f"'{largest.tensor.name}' needs ")
    assert "of the memory of cuda:1" in str(refused.value)
    assert 'compute on the CPU (device="cpu")' in str(refused.value)
    with pytest.raises(
        ResourceError, match="in each of 2 processes: take fewer workers, free more"
    ):
        check_room(batches, cuda, free=2 * needed + _BESIDE, processes=2)
    with pytest.raises(ResourceError, match="needs"):
        check_room(batches, cuda, free=needed + _BESIDE, shared=3)
    check_room(batches, torch.device("cpu"))  # whose memory is the machine's


def test_on_a_device_an_item_is_whole_and_what_is_copied_is_not_there(tmp_path):
    base, experts = save_plain(tmp_path, layers=2, width=640)
    rules = [{"match": "layers.0.*", "use": "base"}]
    copied, merged = plan_of((base, experts), method="average", rules=rules).items
    assert merged.at_once is not None and merged.device_memory > merged.memory
    assert merged.device_memory >= (len(experts) + 1) * 640 * 640 * 4
    check_room([(copied,)], torch.device("cuda"), free=0)
    with pytest.raises(ResourceError, match=r"layers\.1"):
        check_room([(copied,), (merged,)], torch.device("cuda"), free=0)


def test_a_run_asks_the_device_for_its_room(plain, monkeypatch):
    plan = plan_of(plain)
    monkeypatch.setattr(of_runs, "usable_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    free = {"cuda:0": 2**34}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[str(device)], 2**36))
    options = RunOptions(device="cuda", threads=1)
    options.memory([plan])
    held = max(item.device_memory for item in plan.items)
    free["cuda:0"] = held + _BESIDE - 1
    for workers in (1, 2):
        with pytest.raises(ResourceError, match="of the memory of cuda:0"):
            RunOptions(device="cuda", threads=1, workers=workers).memory([plan])
    free["cuda:0"] += 1
    # Of three workers one GPU has two.
    assert RunOptions(device="cuda", threads=1, workers=2).memory([plan]).workers == 2
    with pytest.raises(ResourceError, match="in each of 2 processes"):
        RunOptions(device="cuda", threads=1, workers=3).memory([plan])


def test_a_device_that_runs_full_all_the_same_names_the_tensor(plain, monkeypatch):
    def full(self, *_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore")

    monkeypatch.setattr(Method, "__call__", full)
    with pytest.raises(
        ResourceError, match=r"^'layers\.\d.*full \(CUDA out of memory.*9 GiB.\): free"
    ):
        covmerge.merge(*plain, "ace")


def test_the_address_of_a_cluster_stands_for_its_nodes():
    options = replace(RunOptions(device="cuda", cluster="auto"), resume=True)
    assert options.torch_device == torch.device("cuda")
    assert (options.cluster, options.device) == ("auto", "cuda")
