"""Worker processes as they are on GPUs, in real processes on CPU tensors.

Each has two loads in hand, and sends what it reads ahead.
"""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.errors import ResourceError, TensorError
from covmerge.run.engine import budget, options
from covmerge.run.engine.budget import plan_memory
from covmerge.run.engine.devices import _BESIDE
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.processes import Processes
from covmerge.run.engine.transfer import pinned_bytes
from tests.engine.layers import models, plan, saved
from tests.engine.watched import Watched, noted
from tests.folders import contents
from tests.forked import fork_workers

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")
NAME = "model.layers.{}.self_attn.q_proj.weight"


@pytest.fixture
def as_on_gpus(monkeypatch, tmp_path):
    """Workers that have two loads and send ahead; told what to watch for, a folder of what they note."""
    fork_workers(monkeypatch)
    monkeypatch.setattr(budget, "_hands", lambda device: 2)
    monkeypatch.setattr(options, "pinned_bytes", lambda device: 1)

    def watch(**what):
        """Have them note it, and return where."""
        folder = tmp_path / "notes"
        folder.mkdir()

        def made(devices, opener, inner, **given):
            return Processes(devices, Watched(opener, folder, **what), inner, **given)

        monkeypatch.setattr(options, "Processes", made)
        return folder

    return watch


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ace", "ties"])
def test_what_is_read_and_sent_while_another_load_is_computed(method, as_on_gpus, tmp_path):
    """Nothing is computed in a process before it has read a second load."""
    sources = saved(tmp_path, *models(dtype=torch.bfloat16))
    covmerge.merge(*sources, method, tmp_path / "plain", threads=1)
    folder = as_on_gpus(waits=True)
    result = covmerge.merge(*sources, method, tmp_path / "out", threads=1, workers=2)
    assert result.run["workers"] == 2 and len(noted(folder, "sent-*")) == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize(
    "dies", [{"at": "read"}, {"at": "compute"}, {"at": "compute", "counting": True}], ids=str
)
def test_both_loads_of_one_that_died_are_done_once_more(dies, as_on_gpus, tmp_path):
    sources = saved(tmp_path, *models())
    covmerge.merge(*sources, "ties", tmp_path / "plain", threads=1)
    folder = as_on_gpus(dies=NAME.format(1), **dies)
    covmerge.merge(*sources, "ties", tmp_path / "out", threads=1, workers=2)
    assert noted(folder, "died")
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("at", ["read", "compute"])
@pytest.mark.parametrize("place", range(2))
def test_a_second_death_is_laid_to_the_load_that_it_came_over(place, at, as_on_gpus, tmp_path):
    """Also where it was read while another was computed, or computed while another was read."""
    sources = saved(tmp_path, *models())
    name = NAME.format(place)
    folder = as_on_gpus(dies=name, at=at, times=9)
    with pytest.raises(ResourceError, match=rf"two worker processes ended over '{name}' .*SIGKILL"):
        covmerge.merge(*sources, "ace", tmp_path / "out", threads=1, workers=2)
    assert len(noted(folder, "died")) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_error_ends_a_process_that_waits_for_its_next_load(as_on_gpus, tmp_path):
    unlike = [("e1", NAME.format(3), lambda weight: weight * float("nan"))]
    sources = saved(tmp_path, *models(unlike=unlike))
    as_on_gpus()
    with pytest.raises(TensorError, match=rf"{NAME.format(3)}.*first at \[0, 0\]"):
        covmerge.merge(*sources, "ace", tmp_path / "out", threads=1, workers=2)
    assert not (tmp_path / "out").exists()


def test_memory_of_two_loads_in_hand():
    made = plan(*models())
    one = plan_memory([made], None, device=CPU, workers=3)
    assert one.hands == 1 and one.workers == 3
    largest = max(item.held_bytes + item.statistics_bytes + item.write_bytes for item in made.items)
    assert one.own_in_flight == largest
    assert one.peak == one.resident + one.workspace + one.in_flight
    two = plan_memory([made], None, device=CUDA, workers=3)
    assert (two.hands, two.own_in_flight) == (2, 2 * largest)
    own = two.resident + two.own_in_flight + two.workspace // 3 - two.resident
    assert two.peak == two.resident + 3 * own
    assert two.resident > one.resident + pinned_bytes(CUDA) - 2**24  # each has buffers of its own
    # Where there is no room for two, the second is read when the first has gone.
    least = two.peak - 3 * largest - 1
    tight = plan_memory([made], least, device=CUDA, workers=3)
    assert tight.peak <= least
    assert tight.workers < 3 or tight.own_in_flight >= largest


def test_workers_on_gpus_send_ahead_where_there_is_room(monkeypatch):
    made = plan(*models())
    monkeypatch.setattr(options, "usable_device", torch.device)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    free = {"all": 2**40}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["all"], 2**40))
    options_of = {workers: RunOptions(device="cuda", workers=workers) for workers in (1, 2)}
    memory = options_of[2].memory([made])
    assert memory.ahead and memory.hands == 2
    assert options_of[2].computed() == "on cuda"
    # What is read is not sent where it has no room beside what is computed, and is read all the same.
    largest = max(item.device_memory for item in made.items)
    free["all"] = _BESIDE + largest + memory.own_in_flight - 1
    assert options_of[2].memory([made]) == replace(memory, ahead=False)
    on_cpu = RunOptions(workers=2).memory([made])
    assert not on_cpu.ahead and on_cpu.hands == 1
