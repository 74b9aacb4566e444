"""Files that are small and mean a lot: what they would become is counted before it is made."""

import json
import resource
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.header import parse_header
from covmerge.files.checkpoints.json_file import parse_object
from covmerge.files.checkpoints.open import open_checkpoint
from tests.advised import advice


def peak() -> int:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def empty_tensors(count: int) -> bytes:
    entries = (
        b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number for number in range(count)
    )
    return b"{" + b",".join(entries) + b"}"


HEADERS = {
    "32 million objects": lambda: b'{"a":[' + b"{}," * 32_000_000 + b"{}]}",
    "1.6 million tensors": lambda: empty_tensors(1_600_000),
    "48 million numbers": lambda: b'{"a":[' + b"1," * 48_000_000 + b"1]}",
    "4 million keys": lambda: b"{" + b",".join(b'"%d":1' % n for n in range(4_000_000)) + b"}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_millions_of_values_is_refused_before_it_is_parsed(tmp_path: Path, name: str):
    text = HEADERS[name]()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    size = len(text) >> 20
    del text
    before = peak()
    said = advice(
        "has {} values or more, and no such file needs more than {}: is it the right file?"
    )
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(path)
    assert peak() - before < 2 * size + 50


def test_an_index_of_60_mb_is_refused(tmp_path: Path):
    entries = ",".join(
        f'"model.layers.{number}.w":"model.safetensors"' for number in range(1_300_000)
    )
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{entries}}}}}')
    with pytest.raises(CheckpointError, match=r"index\.json has 1300001 values .* than 600000"):
        open_checkpoint(tmp_path)


def test_the_headers_of_the_largest_models_are_read():
    text = empty_tensors(100_000)
    assert len(parse_header(text, 8 + len(text), "model.safetensors")) == 100_000


def test_the_index_of_the_largest_models_is_read(tmp_path: Path):
    names = [f"model.layers.{n % 60}.mlp.experts.{n // 60}.up_proj.weight" for n in range(210_000)]
    path = tmp_path / "model.safetensors.index.json"
    shards = {name: f"model-{n % 60:05d}-of-00060.safetensors" for n, name in enumerate(names)}
    path.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    with pytest.raises(CheckpointError, match=r"model-00000-of-00060\.safetensors is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"a":' * 65 + "1" + "}" * 65, '{"a":' + "[" * 200 + "]" * 200 + "}"]
)
def test_deep_nesting_is_refused(text: str):
    with pytest.raises(CheckpointError, match="nested more than 64 levels"):
        parse_object(text.encode(), "config.json")


@pytest.mark.parametrize(
    "text",
    [r'{"a": "\ud800"}', r'{"\uDC00": 1}', r'{"a": ["\ud83d\ud83d\ude00"]}', r'{"a": "\uDfFf"}'],
)
def test_half_of_a_surrogate_pair_is_refused(text: str):
    with pytest.raises(CheckpointError, match=r"config\.json holds half of a surrogate pair"):
        parse_object(text.encode(), "config.json")


def test_whole_pairs_and_what_looks_like_half_of_one_are_text():
    text = r'{"a": "\ud83d\ude00", "b": "\\ud800"}'
    assert parse_object(text.encode(), "x") == {"a": "\U0001f600", "b": "\\ud800"}


def test_a_shard_of_an_impossible_name(tmp_path: Path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(r'{"weight_map": {"a": "\ud800"}}')
    with pytest.raises(CheckpointError, match=r"index\.json holds half of a surrogate pair"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name, message",
    [("\ud800", "not valid Unicode"), ("a" * 1001, "name of 1001 characters, and 1000 are read")],
)
@pytest.mark.parametrize("kind", ["memory", "torch", "safetensors"])
def test_names_that_nothing_can_hold(tmp_path: Path, kind: str, name: str, message: str):
    source: object = {name: torch.ones(1)}
    if kind == "torch":
        torch.save(source, tmp_path / "a.pt")
        source = tmp_path / "a.pt"
    elif kind == "safetensors" and len(name) > 1:
        save_file({name: torch.ones(1)}, tmp_path / "a.safetensors")
        source = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(source)


@pytest.mark.parametrize("name", [".metadata", "model.pt"])
def test_a_million_tuples_one_in_the_next_are_no_key(tmp_path: Path, name: str):
    # To hash it takes a call of C for each, which ends the process.
    pickled = b"\x80\x02}" + b")" + b"\x85" * 1_000_000 + b"K\x01s."
    path = tmp_path / name
    if name == ".metadata":
        path.write_bytes(pickled)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/data.pkl", pickled)
    with pytest.raises(CheckpointError, match="more than 1000 tuples, each inside the next"):
        open_checkpoint(tmp_path if name == ".metadata" else path)


def test_a_merge_of_small_adapters_takes_memory_by_their_size(tmp_path: Path):
    """It took 4 MB, for buffers in which files of 1 kB were hashed."""
    save_file({"layers.0.up_proj.weight": torch.ones(8, 8)}, tmp_path / "base.safetensors")
    sides = {"A": torch.ones(1, 8), "B": torch.ones(8, 1)}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["up_proj"]}
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        stem = "base_model.model.layers.0.up_proj.lora_"
        save_file(
            {f"{stem}{side}.weight": factor for side, factor in sides.items()},
            tmp_path / name / "adapter_model.safetensors",
        )

    def merge(out: str) -> None:
        experts = {name: tmp_path / name for name in "ab"}
        covmerge.merge(tmp_path / "base.safetensors", experts, "average", tmp_path / out)

    merge("first")  # and imports what it needs
    tracemalloc.start()
    try:
        merge("second")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
