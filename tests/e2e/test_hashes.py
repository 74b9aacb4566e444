"""The sources are hashed beside the merge: right, never ahead of its reader, and never in its way."""

import hashlib
import json
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.run.engine import hashing
from covmerge.run.engine.hashing import InStep
from covmerge.run.sources import open_checkpoints
from tests.e2e.models import save_family

PIECE = 2**20  # hashed at once


@pytest.fixture
def sources(tmp_path):
    for name in ("base", "a"):
        tensors = {f"w{n}": torch.randn(PIECE // 4) for n in range(8)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return tmp_path / "base.safetensors", {"a": tmp_path / "a.safetensors"}


def sha256(path):
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.fixture
def passed(monkeypatch):
    """Shares that a hashing thread went on at."""
    found, wait = [], InStep._wait

    def watched(self, share):
        wait(self, share)
        found.append(share)

    monkeypatch.setattr(InStep, "_wait", watched)
    return found


def test_hashing_waits_for_the_reader(sources, passed):
    base, experts = sources
    with (
        open_checkpoints(str(base), {"a": str(experts["a"])}, {}) as opened,
        InStep(opened.contents()) as taken,
    ):
        taken.follow(0.5)
        while len(passed) < 2 * 5:  # of either file
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(passed) == 2 * 5
        assert max(passed) <= 0.5
        found = opened.recorded(taken.result())
    assert found["base"]["content"] == {"base.safetensors": sha256(base)}
    assert found["expert a"]["content"] == {"a.safetensors": sha256(experts["a"])}
    assert max(passed) > 0.9


def test_an_error_meanwhile_ends_the_hashing(sources):
    base, experts = sources
    before = set(threading.enumerate())
    with (
        pytest.raises(ValueError, match="of the merge"),
        open_checkpoints(str(base), {"a": str(experts["a"])}, {}) as opened,
        InStep(opened.contents()),
    ):
        raise ValueError("of the merge")
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("method", ["average", "ties"])
def test_a_merge_tells_how_far_it_has_read(tmp_path, monkeypatch, method):
    base, experts = save_family("bert", tmp_path, experts=2)
    shares, follow = [], InStep.follow

    def watched(self, share):
        shares.append(share)
        follow(self, share)

    monkeypatch.setattr(InStep, "follow", watched)
    out = tmp_path / "out"
    covmerge.merge(base, experts, method=method, out=out)
    assert shares == sorted(shares)
    assert len(set(shares)) > 10
    assert shares[-1] == 1.0
    told = json.loads((out / "covmerge.json").read_text())["sources"]
    for key, folder in {"base": base, **{f"expert {e}": p for e, p in experts.items()}}.items():
        for name, digest in told[key]["content"].items():
            assert digest == sha256(folder / name)


def test_more_sources_than_threads(tmp_path):
    """A thread has several then; each source has the hashes of its own files."""
    files = [tmp_path / f"{number}.safetensors" for number in range(2 * hashing._THREADS + 3)]
    for number, file in enumerate(files):
        save_file({"w": torch.full((2, 2), float(number))}, file)
    named = {file.stem: str(file) for file in files[1:]}
    with (
        open_checkpoints(str(files[0]), named, {}) as opened,
        InStep(opened.contents()) as taken,
    ):
        taken.follow(0.1)
        found = opened.recorded(taken.result())
    assert [found[key]["content"] for key in found] == [{f.name: sha256(f)} for f in files]
