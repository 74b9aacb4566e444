"""Files of torch.save: tensors are read, code never runs."""

import json
import os
import pickle
import re
import resource
import warnings
import zipfile
from argparse import Namespace
from collections import OrderedDict
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from covmerge.errors import CheckpointError
from covmerge.files.checkpoints import pickle_bounds, pickled, unpickler
from covmerge.files.checkpoints.open import open_checkpoint
from tests.advised import advice

TENSORS = {
    "w": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "n": torch.tensor(3),
    "e": torch.empty(0, 3),
}


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_state_dicts_are_read_whole_and_by_rows(tmp_path: Path, suffix: str, new: bool) -> None:
    path = tmp_path / f"m{suffix}"
    torch.save(OrderedDict(TENSORS), path, _use_new_zipfile_serialization=new)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.headers) == list(TENSORS)
    for name, tensor in TENSORS.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    rows = checkpoint.read("w", range(1, 3))
    assert torch.equal(rows, TENSORS["w"][1:3])
    assert rows.untyped_storage().nbytes() == rows.nbytes
    assert bool(checkpoint.notes) == (not new)
    with pytest.raises(CheckpointError, match="'w' of shape"):
        checkpoint.read("w", range(2, 9))
    checkpoint.close()
    said = advice("{} is closed: open the checkpoint again")
    with pytest.raises(CheckpointError, match=said):
        checkpoint.read("w")


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_dtypes_without_a_storage_of_their_own(tmp_path: Path, new: bool) -> None:
    """torch 2.6 to 2.15 lay float8 and unsigned numbers over the bytes of an untyped storage."""
    numbers = torch.arange(63.0).reshape(9, 7) / 8
    floats = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
    names = [*(f"float8_{kind}" for kind in floats), "uint16", "uint32", "uint64"]
    tensors = {name: numbers.to(getattr(torch, name)) for name in names}
    tensors |= {"rows": tensors["float8_e4m3fn"][2:5], "turned": tensors["uint16"].T}
    torch.save(tensors, tmp_path / "m.pt", _use_new_zipfile_serialization=new)
    checkpoint = open_checkpoint(tmp_path / "m.pt")
    for name, tensor in tensors.items():
        for rows in (None, range(1, 3)):
            right = (tensor if rows is None else tensor[1:3]).contiguous()
            found = checkpoint.read(name, rows)
            assert (found.dtype, found.shape) == (right.dtype, right.shape)
            assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


def test_memory_is_the_callers_own(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(TENSORS, path)
    checkpoint = open_checkpoint(path)
    checkpoint.read("w").fill_(-1)
    assert torch.equal(checkpoint.read("w"), TENSORS["w"])


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(100_000)}, path)
    checkpoint = open_checkpoint(path)
    os.truncate(path, 5000)
    with pytest.raises(CheckpointError, match="changed while"):
        checkpoint.read("w")


def test_transposed_tensors_parameters_and_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    weight = nn.Parameter(torch.randn(3, 5))
    torch.save({"w": weight, "tied": weight, "t": TENSORS["w"].T, "part": TENSORS["w"][1:]}, path)
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("tied"), weight)
    assert not checkpoint.read("w").requires_grad
    transposed = checkpoint.read("t")
    assert transposed.is_contiguous()
    assert torch.equal(transposed, TENSORS["w"].T)
    assert torch.equal(checkpoint.read("part", range(0, 2)), TENSORS["w"][1:3])


@pytest.mark.parametrize("key", ["state_dict", "model", "module", "model_state_dict", "net"])
@pytest.mark.parametrize("beside", ["numbers", "arguments"])
def test_a_training_state_is_unwrapped_and_says_so(tmp_path: Path, key: str, beside: str) -> None:
    """As PyTorch's tutorial saves it, and as scripts do that save their arguments with it."""
    path = tmp_path / "m.ckpt"
    content = {"epoch": 3, key: OrderedDict(TENSORS), "optimizer": {"lr": 0.1}}
    if beside == "arguments":
        content["optimizer"] = Namespace(lr=0.1, layers=[1, 2])
    torch.save(content, path)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.headers) == list(TENSORS)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in TENSORS.items())
    note = checkpoint.notes[-1]
    assert f"under '{key}'" in note
    assert "'epoch', 'optimizer'" in note


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in prototype stage"
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("saved", [False, True])
def test_a_nested_tensor_is_refused(tmp_path: Path, layout: torch.layout, saved: bool) -> None:
    content = {"w": torch.ones(3), "n": nested(layout)}
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(
        CheckpointError, match=r"'n' is no plain dense tensor.*[nN]ested_?[tT]ensor"
    ):
        open_checkpoint(tmp_path / "m.pt" if saved else content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"w": torch.ones(1), "step": 3}, "'step' is a int"),
        ({"state_dict": {"model": {"w": torch.ones(1)}}}, "'state_dict' is a dict"),
        ({"state_dict": {"w": torch.ones(1)}, "model": {"w": torch.ones(1)}}, "state_dict, model"),
        (
            {"params": {"w": torch.ones(1)}, "params_ema": {"w": torch.ones(1)}},
            "params, params_ema",
        ),
        ({"state_dict": {}, "epoch": 1}, "'state_dict' is a dict"),
        ({"w": torch.ones(1), "stats": {"x": torch.ones(1)}}, "'stats' is a dict"),
        (
            {"model": {"w": torch.ones(1), "extra": b""}, "rng": {"cpu": torch.ones(1)}},
            "'model' is a dict",
        ),
        (torch.ones(3), "holds a Tensor"),
        ([torch.ones(3)], "holds a list"),
        ({3: torch.ones(1)}, "key 3"),
        ({"w": torch.ones(3).to_sparse()}, "sparse"),
        ({"w": torch.ones(3, device="meta")}, "meta"),
        ({"w": torch.ones(3, dtype=torch.complex128)}, "complex128"),
        ({"w": torch.ones(1).expand(2**40)}, "the whole file has"),
    ],
    ids=str,
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "m.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(path)
    assert "m.pt" in str(raised.value)


class Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def bare_pickle(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))  # the protocol of torch.save


def legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, legacy, bare_pickle])
def test_code_in_a_file_is_named_and_never_run(tmp_path: Path, save) -> None:
    path, marker = tmp_path / "m.bin", tmp_path / "marker"
    save({"w": torch.ones(2) if save is not bare_pickle else 1, "x": Trap(marker)}, path)
    with pytest.raises(CheckpointError, match=r"mkdir.*never run.*save_file"):
        open_checkpoint(path)
    assert not marker.exists()
    with path.open("rb") as file, zipfile.ZipFile(file) if save is torch.save else file as content:
        pickled = content.read("m/data.pkl") if save is torch.save else content.read()
    assert b"mkdir" in pickled  # the trap was armed


def test_numbers_that_are_stored_otherwise_are_refused(tmp_path: Path) -> None:
    path, big = tmp_path / "m.pt", tmp_path / "big.pt"
    torch.save({"w": torch.ones(2, dtype=torch.complex64).conj().imag}, path)
    with pytest.raises(CheckpointError, match=r"a tensor is stored as \{'neg': True\}"):
        open_checkpoint(path)
    torch.save(TENSORS, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(big, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    with pytest.raises(CheckpointError, match="has the bytes of its numbers in another order"):
        open_checkpoint(big)


def test_a_stretched_tensor_within_the_files_size_is_read(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0).expand(4, 3)}, tmp_path / "m.pt")
    found = open_checkpoint(tmp_path / "m.pt").read("w", range(1, 3))
    assert torch.equal(found, torch.arange(3.0).expand(2, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")  # of torch 2.15
def test_torchscript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    with pytest.raises(CheckpointError, match="TorchScript"):
        open_checkpoint(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    path, packed = tmp_path / "m.pt", tmp_path / "packed.pt"
    torch.save({"w": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        open_checkpoint(packed)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_damaged_files_are_checkpoint_errors(tmp_path: Path, new: bool) -> None:
    path, damaged = tmp_path / "m.pt", tmp_path / "damaged.pt"
    torch.save({"w": torch.randn(20, 20)}, path, _use_new_zipfile_serialization=new)
    content = path.read_bytes()
    for length in (0, 1, 4, 30, 200, len(content) // 2, len(content) - 1):
        damaged.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"damaged\.pt"):
            open_checkpoint(damaged)
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(0, 400, (60,), generator=generator).tolist():
        damaged.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        try:
            checkpoint = open_checkpoint(damaged)
            for name in checkpoint.headers:
                checkpoint.read(name)
        except CheckpointError:
            pass


def test_other_formats_under_the_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_checkpoint(path)
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"m\.bin cannot be read as a pickle"):
        open_checkpoint(path)


def test_large_legacy_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.bin"
    legacy({"w": torch.zeros(1000)}, path)
    monkeypatch.setattr(pickle_bounds, "MAX_WHOLE_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"before 1\.6.*1000: load it"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("form", "step", "most"),
    [("zip", b"]", pickle_bounds.MAX_STEPS), ("before 1.6", b"}", 200_000)],
    ids=["zip of lists", "dicts before 1.6"],
)
def test_a_pickle_of_millions_of_objects_is_refused_before_any_is_made(
    tmp_path: Path, form: str, step: bytes, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at the true limit, which takes seconds to count to."""
    for counts in (pickle_bounds.check_steps, pickled._next_pickle):
        monkeypatch.setattr(counts, "__defaults__", (most,))
    bomb = b"\x80\x02" + step * (3 * most // 2) + b"."
    path = tmp_path / "pytorch_model.bin"
    if form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", bomb)
            archive.writestr("archive/version", "3\n")
    else:
        machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
        first = (pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, machine))
        path.write_bytes(b"".join(first) + bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=rf"in more than {most} steps.*save its state dict"):
        open_checkpoint(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < most // 10  # KiB


def test_an_average_beside_the_weights_is_named(tmp_path: Path) -> None:
    """As Lightning's StochasticWeightAveraging has it in a ModelCheckpoint file."""
    average = {name: tensor + 1 for name, tensor in TENSORS.items()}
    state = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    content = {
        "epoch": 3,
        "state_dict": TENSORS,
        "optimizer_states": [state],
        "callbacks": {"StochasticWeightAveraging": {"average_model_state": average}},
    }
    torch.save(content, tmp_path / "m.ckpt")
    with closing(open_checkpoint(tmp_path / "m.ckpt")) as checkpoint:
        assert torch.equal(checkpoint.read("w"), TENSORS["w"])
        (note,) = checkpoint.notes
    place = "callbacks/StochasticWeightAveraging/average_model_state"
    said = advice("are under '{}', such as an average: to merge those, save them by themselves")
    assert place in note and re.search(said, note)
    found = content
    for key in place.split("/"):
        found = found[key]  # type: ignore[index]
    torch.save(found, tmp_path / "average.pt")
    with closing(open_checkpoint(tmp_path / "average.pt")) as checkpoint:
        assert torch.equal(checkpoint.read("w"), average["w"])


def test_storage_of_bytes_may_end_in_a_part_of_a_number(tmp_path: Path) -> None:
    data = torch.randint(0, 60, (4097,), dtype=torch.uint8)
    state = {"w": data[:4096].view(torch.float32), "n": data[4:4096].view(torch.uint16)}
    torch.save({"w": state["w"]}, tmp_path / "w.bin")
    torch.save({"n": state["n"]}, tmp_path / "n.bin")
    for name, value in state.items():
        assert torch.equal(open_checkpoint(tmp_path / f"{name}.bin").read(name), value)


def test_rows_of_a_transposed_tensor_are_read_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(300, 500).bfloat16()
    torch.save({"w": weight.T, "e": weight.view(3, 100, 500).permute(2, 0, 1)}, tmp_path / "w.bin")
    monkeypatch.setattr(unpickler, "_SPARSE", 2**10)
    checkpoint, read = open_checkpoint(tmp_path / "w.bin"), list[int]()
    plain = pickled._read_at

    def counting(path: Path, start: int, size: int) -> bytearray:
        read.append(size)
        return plain(path, start, size)

    monkeypatch.setattr(pickled, "_read_at", counting)
    for name, whole in (("w", weight.T), ("e", weight.view(3, 100, 500).permute(2, 0, 1))):
        assert torch.equal(checkpoint.read(name), whole)
        read.clear()
        assert torch.equal(checkpoint.read(name, range(20, 40)), whole[20:40])
        assert sum(read) < weight.nbytes / 2


def test_a_module_without_parameters_may_have_a_file_without_tensors(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    modules = [{"path": "", "type": "models.Transformer"}, {"path": "1_Own", "type": "own.Module"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Own").mkdir()
    torch.save({}, tmp_path / "1_Own" / "pytorch_model.bin")
    assert list(open_checkpoint(tmp_path).headers) == ["w"]
