"""Pickled modules become tensors; what they name is neither imported nor run."""

import copy
import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.runs import covmerge
from torch import nn

from covmerge.errors import CheckpointError
from covmerge_lab.reproduce import pickled
from covmerge_lab.reproduce.pickled import convert, read_tensors


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.MultiheadAttention(4, 2))
        self.tied = self.model[0]
        self.small = nn.Parameter(torch.randn(2, 3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(3, 5).T)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)
        self.prepare = {"steps": {1, 2}, "call": [print], "path": Path("x")}


def legacy(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)


def plain(content, path):
    path.write_bytes(pickle.dumps(content))


def oldest(content, path):
    path.write_bytes(pickle.dumps(content, protocol=0))


SAVES = [torch.save, legacy, plain, oldest]


@pytest.fixture
def gone(monkeypatch):
    """A class of a module that is there for saving only."""
    home = ModuleType("suite_of_somebody")
    home.Encoder = Encoder
    monkeypatch.setattr(Encoder, "__module__", home.__name__)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    yield Encoder
    assert home.__name__ not in sys.modules


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_module_whose_class_nobody_has(tmp_path, gone, monkeypatch, save):
    encoder, path = gone(), tmp_path / "encoder.pt"
    save(encoder, path)
    monkeypatch.delitem(sys.modules, gone.__module__)
    convert(path, tmp_path / "out" / "encoder.safetensors")
    found, wanted = load_file(tmp_path / "out" / "encoder.safetensors"), encoder.state_dict()
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


def test_a_state_dict_is_converted_too(tmp_path):
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "s.pt")
    assert set(read_tensors(tmp_path / "s.pt")) == {"weight", "bias"}


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("save", SAVES)
def test_code_never_runs(tmp_path, save):
    path, marker = tmp_path / "m.pt", tmp_path / "marker"
    armed = nn.Linear(2, 2)
    armed.trap = Trap(marker)
    save(armed, path)
    content = path.read_bytes()
    assert b"system" in content and str(marker).encode() in content  # the trap is armed
    assert set(read_tensors(path)) == {"weight", "bias"}
    save(Trap(marker), path)
    with pytest.raises(CheckpointError, match=r"m\.pt holds a (posix|nt)\.system"):
        read_tensors(path)
    assert not marker.exists()


def test_a_pickle_cannot_change_what_reads_it(tmp_path):
    before = dict(vars(pickled.Inert))
    for global_name in ("torch._utils _rebuild_tensor_v2", "collections OrderedDict", "some thing"):
        # GLOBAL; a state of (None, {"__call__": "x"}); BUILD: it sets an attribute of the global.
        text = b"c" + global_name.replace(" ", "\n").encode() + b"\n(NS'__call__'\nS'x'\nd"
        (tmp_path / "m.pt").write_bytes(text.replace(b"(NS", b"(N(S").replace(b"\nd", b"\ndtb.", 1))
        with pytest.raises(CheckpointError, match=r"m\.pt"):
            read_tensors(tmp_path / "m.pt")
    assert dict(vars(pickled.Inert)) == before


def rewritten(source: Path, target: Path, change) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            kept = change(entry.filename, old.read(entry))
            if kept is not None:
                new.writestr(entry.filename, kept)
    return target


def test_promises_are_checked_before_anything_is_allocated(tmp_path):
    saved = tmp_path / "m.pt"
    torch.save(nn.Linear(64, 64), saved)

    def shorter(name, content):
        return content[:-4] if "/data/" in name else content

    def larger(name, content):
        # 4096 numbers become 2**30, in the count of the storage and nowhere in the file.
        return (
            content.replace(b"M\x00\x10", b"J\x00\x00\x00\x40")
            if name.endswith(".pkl")
            else content
        )

    def fewer(name, content):
        return None if name.endswith("data/0") else content

    for change, message in (
        (shorter, r"data/\d holds \d+ bytes"),
        (larger, "holds 16384 bytes, and 1073741824 numbers"),
        (fewer, "no member m/data/0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_tensors(rewritten(saved, tmp_path / "changed.pt", change))


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    for name, tensor in (
        ("stretched", torch.ones(1).expand(2**40)),
        ("whole", torch.ones(4)[1:]),  # this one is within it
    ):
        torch.save({name: tensor}, tmp_path / f"{name}.pt")
    assert read_tensors(tmp_path / "whole.pt")["whole"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match="does not fit its storage of 1 numbers"):
        read_tensors(tmp_path / "stretched.pt")


def test_a_memo_larger_than_the_file_is_refused(tmp_path):
    (tmp_path / "m.pt").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
    with pytest.raises(CheckpointError, match="counts 2147483647 objects"):
        read_tensors(tmp_path / "m.pt")


def test_modules_that_hold_themselves_end(tmp_path):
    loop = nn.Linear(2, 2)
    loop._modules["again"] = loop
    torch.save(loop, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="without end"):
        read_tensors(tmp_path / "m.pt")


@pytest.mark.parametrize("save", [torch.save, legacy, plain])
def test_damaged_files_are_checkpoint_errors(tmp_path, save):
    path, damaged = tmp_path / "m.pt", tmp_path / "damaged.pt"
    save(nn.Linear(8, 8), path)
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    cuts = [content[:length] for length in (0, 1, 4, 30, len(content) // 2, len(content) - 1)]
    places = torch.randint(0, len(content), (60,), generator=generator).tolist()
    flips = [content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :] for at in places]
    for bad in cuts + flips:
        damaged.write_bytes(bad)
        try:
            read_tensors(damaged)
        except CheckpointError as error:
            assert "damaged.pt" in str(error)


def test_the_command(tmp_path):
    torch.save(copy.deepcopy(nn.Linear(2, 3)), tmp_path / "m.pt")
    out = tmp_path / "m.safetensors"
    assert "2 tensors" in covmerge("convert", tmp_path / "m.pt", out).stdout
    assert set(load_file(out)) == {"weight", "bias"}
    assert "--overwrite" in covmerge("convert", tmp_path / "m.pt", out, code=2).stderr
    covmerge("convert", tmp_path / "m.pt", out, "--overwrite")
    missing = covmerge("convert", tmp_path / "none.pt", tmp_path / "n.safetensors", code=2)
    assert "none.pt" in missing.stderr
    assert not list(tmp_path.glob(".*"))
