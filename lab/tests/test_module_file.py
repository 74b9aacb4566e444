"""Pickled modules become tensors; what they name is neither imported nor run."""

import os
import pickle
import re
import resource
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from covmerge import merge
from covmerge.errors import CheckpointError
from covmerge.files.checkpoints import pickle_bounds, pickled, unpickler
from covmerge_lab.module_file import as_weights, read_weights


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


read_tensors = read_weights


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
    found, wanted = read_tensors(path), encoder.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


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
    with pytest.raises(CheckpointError, match=r"m\.pt holds a (posix|nt)\.system, not a module"):
        read_tensors(path)
    assert not marker.exists()


def test_a_pickle_cannot_change_what_reads_it(tmp_path):
    before = dict(vars(unpickler.Inert))
    for global_name in ("torch._utils _rebuild_tensor_v2", "collections OrderedDict", "some thing"):
        # GLOBAL; a state of (None, {"__call__": "x"}); BUILD: it sets an attribute of the global.
        text = b"c" + global_name.replace(" ", "\n").encode() + b"\n(NS'__call__'\nS'x'\nd"
        (tmp_path / "m.pt").write_bytes(text.replace(b"(NS", b"(N(S").replace(b"\nd", b"\ndtb.", 1))
        with pytest.raises(CheckpointError, match=r"m\.pt"):
            read_tensors(tmp_path / "m.pt")
    assert dict(vars(unpickler.Inert)) == before


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
        module = nn.Module()
        module.w = nn.Parameter(tensor)
        torch.save(module, tmp_path / f"{name}.pt")
    assert read_tensors(tmp_path / "whole.pt")["w"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match="takes 4398046511104 bytes, and the whole file has"):
        read_tensors(tmp_path / "stretched.pt")


def test_one_storage_under_many_names_is_bounded(tmp_path):
    module = nn.Module()
    shared = torch.ones(4096)
    for number in range(100):
        module.register_buffer(f"b{number}", shared)
    torch.save(module, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="bytes, and its tensors 1638400"):
        read_tensors(tmp_path / "m.pt")


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


def test_modules_that_are_in_many_end(tmp_path):
    inner = nn.Linear(2, 2)
    for _ in range(60):
        outer = nn.Module()
        outer.left = outer.right = inner
        inner = outer
    torch.save(inner, tmp_path / "m.pt")
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


def test_a_dict_of_tensors_alone_needs_no_torch_file(tmp_path):
    plain({"w": torch.arange(3), "t": torch.ones(2, 3).T}, tmp_path / "m.pt")
    assert {name: list(t.shape) for name, t in read_tensors(tmp_path / "m.pt").items()} == {
        "w": [3],
        "t": [3, 2],
    }
    plain({"w": torch.arange(3), "step": 3}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="'step' is a int, not a tensor"):
        read_tensors(tmp_path / "m.pt")


class Packed(nn.Module):
    """Keeps its tensors where nobody looks, as quantised modules do."""

    def __getstate__(self):
        return (torch.ones(3),)


def test_no_part_of_a_module_is_left_out(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2), Packed())
    torch.save(module, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"'1' is a .*Packed, which is stored as no module"):
        read_tensors(tmp_path / "m.pt")
    module = nn.Linear(2, 2)
    module._parameters["bias"] = Packed
    torch.save(module, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"'bias' is a .*Packed, not a plain tensor"):
        read_tensors(tmp_path / "m.pt")


BOMBS = {
    # A text of a megabyte, made bytes of two thousand times.
    "bytes": (
        b"\x80\x02c_codecs\nencode\nq\x00X\x00\x00\x10\x00" + b"x" * 2**20 + b"q\x010]"
        b"(" + b"h\x00h\x01\x85R" * 2000 + b"e.",
        "makes more bytes than it holds",
    ),
    "names": (
        b"\x80\x02](" + b"".join(b"cm\n%d\n" % n for n in range(20_000)) + b"e.",
        "names more than 10000 classes",
    ),
    "objects": (b"\x80\x02" + b"]" * 300_000 + b".", "in more than 200000 steps"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_pickle_may_make_is_bounded(tmp_path, name, monkeypatch):
    """With a tenth of the steps: tests/checkpoints/test_read_torch.py counts to the true limit."""
    for counts in (pickle_bounds.check_steps, pickled._next_pickle):
        monkeypatch.setattr(counts, "__defaults__", (200_000,))
    content, message = BOMBS[name]
    path = tmp_path / "m.pt"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message):
        read_weights(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_truth_values_are_0_or_1(tmp_path):
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([True] * 7))
    torch.save(module, tmp_path / "m.pt")
    content = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(content.replace(b"\1" * 7, b"\1\1\7\1\1\1\1"))
    with pytest.raises(CheckpointError, match="'mask' is of bool and holds bytes other"):
        read_tensors(tmp_path / "m.pt")


def test_pickled_modules_are_merged_as_weights(tmp_path):
    layers = [nn.Sequential(nn.Linear(6, 4)) for _ in range(3)]
    for expert in layers[1:]:
        for parameter, first in zip(expert.parameters(), layers[0].parameters(), strict=True):
            parameter.data.mul_(0.01).add_(first.data)
    for name, module in zip("bxy", layers, strict=True):
        torch.save(module, tmp_path / f"{name}.pt")
    sources = [as_weights(tmp_path / f"{name}.pt", tmp_path / "cache") for name in "bxy"]
    out = tmp_path / "out"
    merge(sources[0], {"x": sources[1], "y": sources[2]}, "average", out)
    merged = load_file(out / "model.safetensors")
    mean = (layers[1][0].weight + layers[2][0].weight) / 2
    assert torch.allclose(merged["0.weight"], mean, atol=1e-6)


def test_an_old_file_that_leaves_out_a_storage_is_refused(tmp_path):
    path = tmp_path / "m.pt"
    legacy(nn.Linear(2, 2), path)
    content = path.read_bytes()
    keys = re.search(rb"\x80\x02\]q\x00\((X.*?)e\.", content, re.DOTALL)
    path.write_bytes(content[: keys.start()] + b"\x80\x02]." + content[keys.end() :])
    with pytest.raises(CheckpointError, match="has no storage '"):
        read_weights(path)


class Stretched:
    """A tensor of one number that is told to be larger after it was made."""

    def __init__(self, of):
        self.of = of

    def __reduce__(self):
        numbers = torch.ones(1)._typed_storage()
        laid = (numbers, 0, (1,), (1,), False, OrderedDict())
        larger = {"shape": (2**40,), "strides": (0,), "count": 2**40}
        if self.of == "storage":
            return torch._utils._rebuild_tensor_v2, (Told(numbers, larger), *laid[1:])
        return torch._utils._rebuild_tensor_v2, laid, larger


class Told:
    def __init__(self, numbers, state):
        self.numbers, self.state = numbers, state

    def __reduce__(self):
        return torch.Size, (self.numbers,), self.state


@pytest.mark.parametrize("of", ["tensor", "storage"])
def test_a_pickle_cannot_change_what_it_was_given(tmp_path, of):
    module = nn.Linear(1, 1)
    module._parameters["weight"] = Stretched(of)
    torch.save(module, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="sets the state of a tensor"):
        read_weights(tmp_path / "m.pt")


class Poisoned:
    """A dict whose functions are others."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        others = {"items": print, "keys": print}
        return OrderedDict, (), others, None, iter(self.content.items())


def test_attributes_of_a_dict_are_not_kept(tmp_path):
    module = nn.Sequential(nn.Linear(1, 1))
    module.__dict__["_modules"] = Poisoned(module._modules)
    torch.save(module, tmp_path / "m.pt")
    assert set(read_tensors(tmp_path / "m.pt")) == {"0.weight", "0.bias"}
