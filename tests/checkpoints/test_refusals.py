"""What no honest program has written, or not to its end: each way is refused in words of its own."""

import io
import os
import pickle
import struct
import sys
import zipfile
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from covmerge.base.types import TensorHeader
from covmerge.errors import CheckpointError, InputError
from covmerge.files.adapters import pattern_process
from covmerge.files.checkpoints import distributed, journal
from covmerge.files.checkpoints import pickle_bounds as bounds
from covmerge.files.checkpoints.config_counts import layer_count, restacked, with_vocabulary
from covmerge.files.checkpoints.distributed import METADATA
from covmerge.files.checkpoints.hashes import _Reader
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.checkpoints.trainer import last_steps
from covmerge.files.quantised.view import packed_pair
from covmerge.files.quantised.writing.layouts import LAYOUTS, with_plain
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.regular_file import read_regular
from covmerge.files.stores.store import StoredFile
from covmerge.front.reporting.job import check_page
from tests.adapters.test_adapters import CONFIG, STEM, WEIGHTS, adapter, change  # noqa: F401
from tests.advised import advice
from tests.checkpoints.test_distributed import STATE, chunk, save, spoil
from tests.quantised.ggufs import save_llama
from tests.quantised.models import llama

ONE = torch.ones(2, 2)


def gguf(key: str, kind: int, value: bytes) -> bytes:
    """A file with one key, and of its tensor nothing."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", len(key))
    return head + key.encode() + struct.pack("<I", kind) + value + bytes(99)


@pytest.mark.parametrize(
    "content, message",
    [
        (gguf("general.alignment", 4, struct.pack("<I", 12)), "has an alignment of 12"),
        (
            gguf("x", 9, struct.pack("<IQ", 9, 1)),
            advice("{} {}: fetch the file again, or convert it anew"),
        ),
        (gguf("x", 9, struct.pack("<IQ", 4, 1 << 60)), "does not end within"),
        (gguf("x", 99, b""), "a value of type 99"),
    ],
)
def test_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "model.gguf")
    again = save_llama(llama(1), tmp_path / "model.gguf", "Q8_0")
    assert open_checkpoint(again).headers


@pytest.mark.parametrize(
    "content, message",
    [
        (
            b"\x80\x02\x82\x01.",
            advice("fetch the file again, or save the state dict with safetensors.torch.save_file"),
        ),
        (pickle.dumps({3: ONE}), "has the key 3: tensors are named by strings"),
        (pickle.dumps([1]), "model"),
        (pickle.dumps({}), "without tensors|holds no tensors"),
        (pickle.dumps({"w": "a" * 300}, 2)[:-99], advice("and {} are left: fetch the file again")),
    ],
)
def test_pickles(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "model.bin")
    torch.save({"w": ONE}, tmp_path / "model.bin")
    assert torch.equal(open_checkpoint(tmp_path / "model.bin").read("w"), ONE)


def test_an_archive_of_two_pickles(tmp_path: Path) -> None:
    saved = io.BytesIO()
    torch.save(torch.nn.Linear(2, 2), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(tmp_path / "m.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        new.writestr("other/data.pkl", b"N.")
    with pytest.raises(CheckpointError, match=r"2 members data\.pkl, not one"):
        open_checkpoint(tmp_path / "m.pt")


def test_a_pickle_in_an_archive_has_a_bound(tmp_path: Path, monkeypatch) -> None:
    torch.save({"w": ONE}, tmp_path / "m.pt")
    monkeypatch.setattr(bounds, "_MAX_PICKLE_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"m\.pt"):
        open_checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize(
    "tensors, message",
    [
        (
            {f"{STEM}.base_layer.base_layer.lora_{n}.weight": ONE.clone() for n in "AB"},
            "is wrapped twice",
        ),
        ({}, "holds no tensors: the file is incomplete"),
        ({"base_model.model.classifier.weight": ONE}, "no low-rank factors, only 1 whole tensors"),
    ],
)
def test_adapters(adapter: Path, tensors, message: str) -> None:  # noqa: F811
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(adapter)


def test_an_adalora_without_a_scale(adapter: Path) -> None:  # noqa: F811
    layers = {f"{STEM}.lora_A": torch.ones(3, 16), f"{STEM}.lora_B": torch.ones(16, 3)}
    save_file(layers | {f"{STEM}.lora_E": torch.ones(3, 1)}, adapter / WEIGHTS)
    change(adapter, peft_type="ADALORA", lora_alpha=-1)
    with pytest.raises(CheckpointError, match=r"lora_alpha = -1.*AdaLoRA has it positive"):
        open_checkpoint(adapter)


def test_a_pipeline_is_several_models(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "unet").mkdir()
    with pytest.raises(CheckpointError, match=r"pipeline of diffusers.*such as .*/unet"):
        open_checkpoint(tmp_path)


def test_shards_of_deepspeed_are_gathered_first(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-5"
    step.mkdir(parents=True)
    (step / "trainer_state.json").write_text("{}")
    (step / "global_step5").mkdir()
    with pytest.raises(CheckpointError, match="shards of DeepSpeed or FSDP and no model"):
        last_steps("run", None, tmp_path)


def test_a_checkpoint_without_its_last_file(tmp_path: Path) -> None:
    for step in (5, 10):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": ONE}, folder / "model.safetensors")
    (tmp_path / "run" / "checkpoint-5" / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no trainer_state\.json, which is written last"):
        last_steps("run", None, tmp_path)


def test_metadata_of_torch_distributed(tmp_path: Path, monkeypatch) -> None:
    folder = save({"w": STATE["w"]}, tmp_path / "good")

    def without_chunks(metadata) -> None:
        metadata.state_dict_metadata["w"].chunks.clear()

    def unnamed(metadata) -> None:
        metadata.state_dict_metadata = {3: metadata.state_dict_metadata["w"]}

    for spoilt, message in (
        (without_chunks, "has no chunks"),
        (unnamed, advice("{} has {} where a name should be: fetch it again")),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(spoil(folder, spoilt))
    for bound, value, message in (
        ("_MAX_BYTES", 10, "bytes, and 10 are read"),
        ("MAX_TENSORS", 0, "1 tensors, and 0 are read"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(distributed, bound, value)
            with pytest.raises(CheckpointError, match=rf"{METADATA} has \d+ {message}|{message}"):
                open_checkpoint(folder)
    assert chunk((0,), (1,)).sizes == (1,)
    assert torch.equal(open_checkpoint(folder).read("w"), STATE["w"])


def test_truth_values_of_torch_distributed_are_0_or_1(tmp_path: Path) -> None:
    folder = save({"w": torch.tensor([True] * 64)}, tmp_path / "good")
    data = folder / "__0_0.distcp"
    right = data.read_bytes()
    data.write_bytes(right.replace(b"\1" * 64, b"\1" * 63 + b"\7"))
    said = advice("is of bool and holds bytes other than 0 and 1: save it again")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(folder).read("w")
    data.write_bytes(right)
    assert open_checkpoint(folder).read("w").all()


def test_a_journal_has_a_bound(tmp_path: Path, monkeypatch) -> None:
    journal.Journal.create(tmp_path / "journal.jsonl", plan_hash="1f")
    monkeypatch.setattr(journal, "_MAX_BYTES", 3)
    said = advice("it is larger than {} bytes, which none is; start over with --overwrite")
    with pytest.raises(CheckpointError, match=said):
        journal.Journal.resume(tmp_path / "journal.jsonl", plan_hash="1f")


def test_a_small_file_has_a_bound(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    assert read_regular(tmp_path / "x", 4) == b"1234"
    with pytest.raises(CheckpointError, match="larger than 3 bytes, which no such file is"):
        read_regular(tmp_path / "x", 3)


def test_patterns_are_answered_by_the_first_that_fits(monkeypatch, capsys) -> None:
    assert pattern_process.answer(["b", r"a(?P<idx>\d)"], ["a1", "b", "bc"], whole=True) == [
        (1, "1"),
        (0, None),
        None,
    ]
    assert pattern_process.answer(["b"], ["bc"], whole=False) == [(0, None)]
    monkeypatch.setattr(pattern_process, "_limit", lambda seconds: None)
    for fields, answer in (
        ('{"t": [["b"], true]}', '{"found": {"t": [[0, null]]}}'),
        ('{"t": [["("], true]}', '{"refused": ["t", "(", '),
    ):
        monkeypatch.setattr(sys, "argv", ["", "4"])
        monkeypatch.setattr(sys, "stdin", io.StringIO(f'[{fields}, ["b"]]'))
        pattern_process.main()
        assert capsys.readouterr().out.startswith(answer)


def test_what_a_config_says_of_a_language_model_inside_it() -> None:
    inner = {"num_hidden_layers": 2, "layer_types": ["a", "b"], "eos_token_id": 3}
    config = {"text_config": inner, "layers": ["no", "such", "count"]}
    assert restacked(config, [1])["text_config"] == {
        **inner,
        "num_hidden_layers": 1,
        "layer_types": ["b"],
    }
    found = with_vocabulary({"text_config": {"vocab_size": 8, "eos_token_id": 3}}, 9, {})
    assert found == {"text_config": {"vocab_size": 9}}
    assert layer_count({"hidden_size": 4}) is None


def test_packed_weights_that_a_layout_cannot_hold() -> None:
    for name, shape in (("int4-group", (8, 30)), ("awq", (7, 256)), ("mxfp4", (2, 30, 8))):
        assert LAYOUTS[name].packing(TensorHeader("fc.weight", shape, torch.float32)) is None
    held = {"a.weight": torch.uint8, "a.weight.quant_state.bitsandbytes__nf4": torch.uint8}
    headers = {name: TensorHeader(name, (2, 2), dtype) for name, dtype in held.items()}
    assert packed_pair(headers) == tuple(held)
    assert with_plain({"quant_method": "fp8"}, []) == {"quant_method": "fp8"}


def test_a_page_is_no_folder_and_has_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder: name a file, such as"):
        check_page(tmp_path)
    with pytest.raises(InputError, match=r"there is no folder .*nowhere for x.html: make it first"):
        check_page(tmp_path / "nowhere" / "x.html")


def test_a_hash_of_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1000)}, tmp_path / "model.safetensors")
    with _Reader(StoredFile(LocalFolder(tmp_path), "model.safetensors")) as reader:
        os.truncate(tmp_path / "model.safetensors", 10)
        said = advice("{} was cut short while it was read: verify it again")
        with pytest.raises(CheckpointError, match=said):
            reader.fill(memoryview(bytearray(11)))


@pytest.mark.parametrize(
    "save",
    [
        partial(torch.save, pickle_protocol=4),
        partial(torch.save, pickle_protocol=4, _use_new_zipfile_serialization=False),
        lambda state, path: path.write_bytes(pickle.dumps(state)),
    ],
    ids=["protocol 4", "protocol 4 before torch 1.6", "plain pickle"],
)
def test_dicts_of_tensors_that_torch_does_not_load_are_read(tmp_path: Path, save) -> None:
    """torch's own loader, allowed to run nothing, refuses them."""
    state = {"fc.weight": torch.arange(6.0).reshape(2, 3), "on": torch.tensor([True, False])}
    save(state, tmp_path / "model.bin")
    with closing(open_checkpoint(tmp_path / "model.bin")) as opened:
        assert opened.headers.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(opened.read(name), tensor)
        assert torch.equal(opened.read("fc.weight", range(1, 2)), state["fc.weight"][1:])
