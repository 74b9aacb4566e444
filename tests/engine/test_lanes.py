"""Small items on one core each, several at once: the same bytes, the same errors, within memory."""

import threading
import time
import types

import pytest
import torch

import covmerge
from covmerge.errors import TensorError
from covmerge.plan.planning.build import build_plans
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine.budget import plan_memory
from covmerge.run.engine.inputs import read_inputs
from covmerge.run.engine.worker import work
from covmerge.run.sources import open_checkpoints

CPU = torch.device("cpu")


def models(layers=12, width=48, experts=3):
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{n}.mlp.up_proj.weight" for n in range(layers)]
    base = {name: torch.randn(width, width, generator=generator) for name in names}
    moved = {
        f"e{number}": {
            name: weight + 0.01 * torch.randn(width, width, generator=generator)
            for name, weight in base.items()
        }
        for number in range(experts)
    }
    return base, moved


def plan_of(base, experts):
    recipe = parse_recipe({"base": "base", "experts": {e: e for e in experts}, "method": "ace"})
    with open_checkpoints(base, experts, {}) as opened:
        return build_plans([recipe], opened.base, opened.experts, {})[0]


@pytest.mark.parametrize("method", ["ace", "tsv_m", "ties", "average"])
def test_the_number_of_lanes_changes_no_byte(method):
    base, experts = models()
    merged = [covmerge.merge(base, experts, method, threads=threads).tensors for threads in (1, 4)]
    for name, tensor in merged[0].items():
        assert torch.equal(tensor, merged[1][name])


def test_large_items_are_counted_alone(monkeypatch):
    base, experts = models()
    expected = covmerge.merge(base, experts, "ties", threads=3).tensors
    monkeypatch.setattr("covmerge.plan.planning.work._NARROW_ELEMENTS", 0)
    running, lock = 0, threading.Lock()

    def watched(items, *given):
        nonlocal running
        with lock:
            running += 1
            assert running == 1
        time.sleep(0.005)
        with lock:
            running -= 1
        yield from work(items, *given)

    monkeypatch.setattr("covmerge.run.engine.threads.work", watched)
    merged = covmerge.merge(base, experts, "ties", threads=3).tensors
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_items_really_run_beside_each_other(monkeypatch):
    together = threading.Barrier(3)  # broken, and an error, where one of three never comes

    def watched(*given):
        assert torch.get_num_threads() == 1
        together.wait(timeout=300)
        yield from work(*given)

    base, experts = models()
    assert len(base) % 3 == 0
    before = torch.get_num_threads()
    monkeypatch.setattr("covmerge.run.engine.threads.work", watched)
    covmerge.merge(base, experts, "average", threads=3)
    assert torch.get_num_threads() == before


def test_reading_leaves_the_other_cores_to_the_lanes(monkeypatch):
    # Converting factors on two threads took twice the processor's time of the whole merge.
    seen = set()

    def watched(*given):
        seen.add(torch.get_num_threads())
        return read_inputs(*given)

    monkeypatch.setattr("covmerge.run.engine.threads.read_inputs", watched)
    covmerge.merge(*models(), "average", threads=3)
    assert seen == {1}


def test_an_error_in_one_lane_ends_the_merge():
    base, experts = models()
    experts["e1"]["layers.5.mlp.up_proj.weight"][3, 4] = float("nan")
    with pytest.raises(TensorError, match=r"layers\.5.*first at \[3, 4\]"):
        covmerge.merge(base, experts, "ace", threads=3)


def test_lanes_are_bounded_by_memory(monkeypatch):
    # A process that neither grows meanwhile nor shares its machine.
    taken = types.SimpleNamespace(rss=2**29, available=2**35)
    monkeypatch.setattr("psutil.Process.memory_info", lambda self: taken)
    monkeypatch.setattr("psutil.virtual_memory", lambda: taken)
    base, experts = models(width=512)
    plan = plan_of(base, experts)
    assert all(item.is_narrow(CPU) for item in plan.items)
    many = plan_memory([plan], None, device=CPU, threads=10_000)
    assert 1 < many.lanes < 10_000
    assert many.workspace <= 2**31
    one = plan_memory([plan], None, device=CPU, threads=1)
    tight = plan_memory([plan], one.peak, device=CPU, threads=8)
    assert tight.peak <= one.peak
