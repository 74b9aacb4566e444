"""A few trials of each campaign that merges to the end; and that its table tells right from wrong."""

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from tests.campaigns import distributed, outcomes
from tests.campaigns.disturbed import Ended
from tests.campaigns.test_faults import campaign


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_wrong_is_told_from_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    made = outcomes.models(Random(0))
    right = outcomes.average(made["a"], made["b"])
    (tmp_path / "out").mkdir()
    stored = {name: value.to(dtype) for name, value in right.items()}

    def verdict(right: outcomes.Tensors | None = right, *, code: int = 0, said: str = "") -> str:
        save_file(stored, tmp_path / "out" / "model.safetensors")
        return outcomes.judge(Ended(code, said), tmp_path / "out", right, ("a.bin",))[0]

    assert verdict() == outcomes.RIGHT
    assert verdict(None) == outcomes.WRONG
    assert verdict(code=2, said="error: a.bin is cut short") == outcomes.REFUSED
    assert verdict(code=2, said="error: a file is cut short") == outcomes.TRACEBACK
    assert verdict(code=1, said="Traceback: a.bin") == outcomes.TRACEBACK
    (tmp_path / "out" / "covmerge.json").touch()
    assert verdict(code=2, said="error: a.bin is cut short") == outcomes.LEFT
    for wrong in (float("nan"), float(right["norm.weight"][3]) * (1 + 2 * torch.finfo(dtype).eps)):
        stored["norm.weight"][3] = wrong + 1e-4 * (dtype is torch.float32)
        assert verdict() == outcomes.WRONG
    del stored["norm.weight"]
    assert verdict() == outcomes.WRONG


@pytest.mark.slow
def test_servers_that_lie_and_fail():
    kinds = (
        "web: a file without",
        "web: another range",
        "bucket: objects are",
        "push: done, and c",
    )
    named = [word for kind in kinds for word in ("--kind", kind)]
    assert "| all | 5 |" in campaign("servers", *named, "--count", 1, "--seed", 1)


def test_damaged_shards(tmp_path: Path) -> None:
    assert "| all | 7 |" in campaign("distributed", "--count", 1, "--seed", 1)
    assert not distributed._TRIP.exists()


def test_little_memory():
    kinds = ("memory: RLIMIT_AS", "memory: --max-memory")  # a cgroup takes root
    asked = [word for kind in kinds for word in ("--kind", kind)]
    assert "| all | 2 |" in campaign("machine", *asked, "--count", 1, "--seed", 1)
