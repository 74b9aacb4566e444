"""`kill -9` at any moment, then resume: the same bytes as an undisturbed run."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError, TensorError
from tests.e2e.models import save_family
from tests.held import held, journaled, wait_until

PARTIAL = ".out.covmerge-partial"


def save_plain(folder, layers=40, width=256, experts=3):
    """Checkpoints with many matrices and no config."""
    generator = torch.Generator().manual_seed(0)
    base = {
        f"layers.{n}.proj.weight": torch.randn(width, width, generator=generator)
        for n in range(layers)
    }
    save_file(base, folder / "base.safetensors")
    paths = {}
    for t in range(experts):
        expert = {
            n: w + 0.01 * 4**t * torch.randn(w.shape, generator=generator) for n, w in base.items()
        }
        paths[f"e{t}"] = folder / f"e{t}.safetensors"
        save_file(expert, paths[f"e{t}"])
    return folder / "base.safetensors", paths


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def merging(base, experts, out, **options):
    sources = {name: str(path) for name, path in experts.items()}
    return (
        f"import covmerge; covmerge.merge({str(base)!r}, {sources!r}, out={str(out)!r}, "
        f"threads=1, **{options!r})"
    )


def merge_apart(*args, **options):
    """Merge in a process of its own, whose number of threads is not this one's."""
    subprocess.run([sys.executable, "-c", merging(*args, **options)], check=True)


@pytest.mark.slow
def test_kill_and_resume_gives_the_same_bytes(tmp_path):
    base, experts = save_plain(tmp_path)
    merge_apart(base, experts, tmp_path / "undisturbed")

    journal = tmp_path / PARTIAL / "journal.jsonl"
    for target in (5, 15, 30):  # finished items at which the process is killed
        program = merging(base, experts, tmp_path / "out", resume=target > 5)
        with held(program, before="layers.9.proj.weight") as process:  # the last of the plan
            wait_until(partial(journaled, journal, target), process)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
        assert journal.exists()

    # Whatever the kill left in a shard beyond the journal, even garbage, is written again.
    shard = tmp_path / PARTIAL / "output" / "model.safetensors"
    lines = journal.read_text().splitlines()
    with shard.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    assert len(lines) < 41
    merge_apart(base, experts, tmp_path / "out", resume=True)
    assert digests(tmp_path / "out") == digests(tmp_path / "undisturbed")
    assert not (tmp_path / PARTIAL).exists()


def test_damaged_finished_rows_are_computed_again(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    covmerge.merge(base, experts, out=tmp_path / "undisturbed")
    finished = interrupt_after(tmp_path, base, experts, items=3)
    shard = tmp_path / PARTIAL / "output" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[place_of(finished[0], data) + 10] ^= 0xFF
    shard.write_bytes(bytes(data))
    result = covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
    assert result.run["resumed_items"] == 2
    assert digests(tmp_path / "out") == digests(tmp_path / "undisturbed")


def place_of(name, data):
    """Where the bytes of a tensor begin in those of a safetensors file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    return begin + json.loads(data[8:begin])[name]["data_offsets"][0]


def interrupt_after(tmp_path, base, experts, items):
    """Interrupt a merge, as by Ctrl-C, once some items are written; they are returned.

    Which they are is not promised: small items are computed side by side.
    """
    finished = []

    class Interrupt:
        def start(self, total):
            pass

        def advance(self, what, size, *, resumed=False):
            finished.append(what)
            if len(finished) == items:
                raise KeyboardInterrupt

        def finish(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        covmerge.merge(base, experts, out=tmp_path / "out", progress=Interrupt())
    assert not (tmp_path / "out").exists()
    assert (tmp_path / PARTIAL).exists()
    return finished


def test_unfinished_work_needs_a_decision(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2)
    with pytest.raises(InputError, match="--resume to go on, --overwrite to start again"):
        covmerge.merge(base, experts, out=tmp_path / "out")
    with pytest.raises(InputError, match="overwrite"):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True, eps=0.5)
    assert (tmp_path / PARTIAL / "journal.jsonl").exists()  # another recipe destroys nothing
    covmerge.merge(base, experts, out=tmp_path / "out", resume=True)


def test_changed_sources_are_not_resumed(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2)
    path = experts["e1"]
    path.write_bytes(path.read_bytes())
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="overwrite"):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)


def test_the_same_recipe_gives_the_same_bytes(tmp_path):
    base, experts = save_family("gpt2", tmp_path)
    for out in ("a", "b"):
        covmerge.merge(base, experts, out=tmp_path / out, shard_size="20KB")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    json.loads((tmp_path / "a" / "covmerge.json").read_text())


def test_an_error_halfway_leaves_nothing_behind(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    broken = load_file(experts["e2"])
    broken["layers.2.proj.weight"][3, 5] = float("nan")
    save_file(broken, experts["e2"])
    with pytest.raises(TensorError, match=r"'layers.2.proj.weight' of expert 'e2'.*at \[3, 5\]"):
        covmerge.merge(base, experts, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "base.safetensors", "e0.safetensors", "e1.safetensors", "e2.safetensors",
    ]  # fmt: skip
