"""What was counted, as bytes from one process to another."""

import zlib

import pytest
import torch

import covmerge
from covmerge.plan.planning import types
from covmerge.run.engine import global_pass
from covmerge.run.engine.selection import Selections


@pytest.fixture
def passes(monkeypatch):
    """The selections of every pass of a global pass with guesses, before what it counted is looked at."""
    seen = []

    class Shown(Selections):
        def end_pass(self):
            whole = self.counted()
            other = self.emptied()
            assert len(zlib.decompress(other.counted())) == len(zlib.decompress(whole))
            other.absorb_counted(memoryview(whole))
            assert other.counted() == whole
            seen.append((self.emptied(), whole))
            super().end_pass()

    monkeypatch.setattr(global_pass, "Selections", Shown)
    monkeypatch.setattr(types, "_LEAST_SAMPLED", 0)
    base = {"w": torch.zeros(64, 64)}
    experts = {e: {"w": torch.randn(64, 64)} for e in "ab"}
    covmerge.merge(base, experts, method="ties")
    return seen


def test_counts_of_every_pass_go_over_whole_and_small(passes):
    assert len(passes) >= 3
    for _, counts in passes:
        assert len(counts) < 2**17  # of counters of 2 to 8 MiB, nearly all of them 0


def test_other_counts_are_refused(passes):
    selections, counts = passes[-1]
    for wrong in (b"", counts[:-40], zlib.compress(b"\0" * 2**26), b"\1" * 100):
        with pytest.raises(ValueError, match="not of this pass"):
            selections.absorb_counted(memoryview(wrong))
