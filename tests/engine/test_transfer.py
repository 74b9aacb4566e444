"""Rows that go to a device through two buffers, on the CPU: the same bytes, whenever copies are done."""

from contextlib import contextmanager

import pytest
import torch

import covmerge
from covmerge.base.types import LowRank, Measured
from covmerge.errors import TensorError
from covmerge.run.engine import options, threads
from covmerge.run.engine import transfer as of_transfer
from covmerge.run.engine.budget import plan_memory
from covmerge.run.engine.inputs import Inputs
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.transfer import Transfer, pinned_bytes
from tests.e2e.test_adapters import pytestmark as of_adapters
from tests.e2e.test_adapters import save_two_adapters
from tests.engine.layers import models, plan, saved
from tests.engine.watched import SMALL, Late
from tests.folders import contents

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@contextmanager
def sent_by(transfer):
    """Merges whose rows are sent ahead on the CPU; what has sent them."""
    used = []

    def made(device):
        used.append(transfer(device, SMALL))
        return used[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "pinned_bytes", lambda device: 1)
        patch.setattr(threads, "Transfer", made)
        yield used
    assert used
    for own in used:
        if transfer is Late:
            own.stream.shutdown()


by_each = pytest.mark.parametrize("transfer", [Transfer, Late])


@by_each
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str
)
def test_inputs_arrive_as_they_were_read(transfer, dtype):
    def drawn(*shape):
        return (10 * torch.randn(shape)).to(dtype)

    factors = LowRank(drawn(40, 3), drawn(3, 50))
    inputs = Inputs(
        drawn(40, 50),
        {
            "a": drawn(50, 40).mT,
            "b": None,
            "c": factors,
            "d": (factors, factors),
            "e": drawn(0, 50),
        },
        {"gram": {"a": Measured(drawn(50, 50), rows=3, total=1.0)}},
    )
    way = transfer(CPU, SMALL)
    sent, arrival = way.send(inputs)
    scalar, _ = way.send(Inputs(drawn(), {}))
    arrival.synchronize()
    assert torch.equal(sent.base, inputs.base) and sent.base.data_ptr() != inputs.base.data_ptr()
    assert list(sent.experts) == list(inputs.experts) and sent.experts["b"] is None
    assert torch.equal(sent.experts["a"], inputs.experts["a"])
    for own in (sent.experts["c"], *sent.experts["d"]):
        assert torch.equal(own.left, factors.left) and torch.equal(own.right, factors.right)
    assert sent.experts["e"].shape == (0, 50)
    there = sent.measured["gram"]["a"]
    assert torch.equal(there.value, inputs.measured["gram"]["a"].value) and there.rows == 3
    assert scalar.base.shape == () and sent.base.dtype == dtype
    # What was not read has no rows to send.
    meta = torch.empty(2, 3, device="meta")
    assert way.send(Inputs(meta, {}))[0].base is meta


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "method, given",
    [("ace", {}), ("ties", {}), ("auto", {})],
)
@by_each
def test_a_merge_whose_rows_are_sent_ahead_has_the_same_bytes(
    transfer, method, given, tmp_path, monkeypatch
):
    """Items counted before and merged; what is copied stays where it is."""
    sources = saved(tmp_path, *models(dtype=torch.bfloat16))
    rules = [{"match": "*embed*", "use": "base"}]
    given = {"rules": rules, "threads": 1, **given}
    covmerge.merge(*sources, method, tmp_path / "plain", **given)
    with sent_by(transfer) as used:
        covmerge.merge(*sources, method, tmp_path / "sent", **given)
    assert contents(tmp_path / "sent") == contents(tmp_path / "plain")
    assert all(own.pieces > 16 for own in used if transfer is Late)


@of_adapters
def test_factors_of_adapters_are_sent_ahead(tmp_path):
    given = save_two_adapters(tmp_path)
    plain = covmerge.merge(*given, "ace", threads=1)
    with sent_by(Late):
        sent = covmerge.merge(*given, "ace", threads=1)
    for name, tensor in plain.tensors.items():
        assert torch.equal(sent.tensors[name], tensor)


@by_each
def test_an_error_names_the_tensor(transfer):
    name = "model.layers.2.self_attn.v_proj.weight"
    unlike = [("e1", name, lambda weight: weight * float("nan"))]
    with sent_by(transfer), pytest.raises(TensorError, match=rf"{name}.*first at \[0, 0\]"):
        covmerge.merge(*models(unlike=unlike), "ace", threads=1)


def test_rows_are_sent_ahead_where_there_is_room(monkeypatch):
    """Not at all on a CPU; on a GPU where what is in flight fits beside what is computed."""
    made = plan(*models())
    assert pinned_bytes(CPU) == 0 and pinned_bytes(CUDA) == 2 * of_transfer._BYTES
    assert not RunOptions().memory([made]).ahead
    monkeypatch.setattr(options, "usable_device", torch.device)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    for free, ahead in ((2**30, True), (600 * 2**20, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        memory = RunOptions(device="cuda:1").memory([made])
        assert memory.ahead == ahead


def test_the_buffers_are_in_the_memory_plan():
    made = plan(*models())
    pinned = pinned_bytes(CUDA)
    own, without = (plan_memory([made], None, device=device, threads=1) for device in (CUDA, CPU))
    assert pinned - 2**24 < own.resident - without.resident < pinned + 2**24
