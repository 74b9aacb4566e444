"""Which device each process computes on, without any."""

from contextlib import closing

import pytest
import torch

from covmerge.engine import Context, NoOutput, Processes, RunOptions, Task, find_rank, usable_device
from covmerge.engine import options as of_runs
from covmerge.engine import workers as choosing
from covmerge.engine.devices import own_device
from covmerge.errors import InputError
from covmerge.plan import build_plan
from covmerge.recipe import parse_recipe
from covmerge.sources import open_checkpoints
from tests.cli.runs import covmerge as command
from tests.e2e.test_resume import save_plain

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain"), layers=4, width=64)


@pytest.mark.parametrize("name", ["cpuu", "cuda:-3", "meta:x"])
def test_what_is_no_device(name):
    for use in (usable_device, lambda name: RunOptions(device=name, cluster="auto").torch_device):
        with pytest.raises(InputError, match=f"--device {name} cannot be used here: "):
            use(name)


@no_gpu
def test_who_gives_out_tasks_needs_no_gpu_of_its_own(plain):
    options = RunOptions(device="cuda", cluster="auto")
    assert options.torch_device == torch.device("cuda")
    with pytest.raises(InputError, match="--device cuda cannot be used here: "):
        _ = options.device_here  # for what it does itself, such as to run the base
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
    assert str(own_device("cuda", rank.place, gpus)) == taken
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(of_runs, "usable_device", torch.device)
    assert str(RunOptions(device="cuda", rank=rank).torch_device) == taken
    for named in ("cuda:1", "cpu", "meta"):
        assert str(RunOptions(device=named, rank=rank).torch_device) == named


def plan_of(plain):
    base, experts = plain
    given = {"base": str(base), "experts": {n: str(p) for n, p in experts.items()}, "method": "ace"}
    with open_checkpoints(base, experts, {}) as opened:
        return build_plan(parse_recipe(given), opened.base, opened.experts)


def test_each_worker_takes_a_gpu(plain, monkeypatch):
    plan = plan_of(plain)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(of_runs, "usable_device", torch.device)
    monkeypatch.setattr(choosing, "_SMALL", 1)

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
def test_a_worker_computes_on_its_own_device(plain):
    """Not on that of whoever started it; where there is none it says so."""
    plan, (base, experts) = plan_of(plain), plain
    batches = [(index, (item,)) for index, item in enumerate(plan.items)]
    with open_checkpoints(base, experts, {}) as opened:
        there = Context(torch.float32, torch.device("cuda"), ({},))
        task = Task(opened.sources(), there, (NoOutput(),))
        with closing(Processes([torch.device("cpu")], opened.opener())) as executor:
            assert len(list(executor.run(batches, task))) == len(batches)
        executor = Processes([torch.device("cuda", 1)], opened.opener())
        with pytest.raises(InputError, match="--device cuda:1 cannot be used here: "):
            list(executor.run(batches, task))
    assert executor._workers == []  # it is closed
