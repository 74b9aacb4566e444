"""Folders, their indices, state dicts, and how a source is told from another."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.base import Checkpoint, fingerprint
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores.paths import safe_child

Opens = Callable[[Path], Checkpoint]


A = {"a": torch.arange(6.0).reshape(3, 2)}
B = {"b": torch.arange(4, dtype=torch.bfloat16), "c": torch.tensor(1)}
INDEX = "model.safetensors.index.json"


def sharded(folder: Path, weight_map: Mapping[str, object] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(A, folder / "model-00001-of-00002.safetensors")
    save_file(B, folder / "model-00002-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors"} | dict.fromkeys(
        B, "model-00002-of-00002.safetensors"
    )
    mapped = files if weight_map is None else {**files, **weight_map}
    kept = {name: file for name, file in mapped.items() if file is not None}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": kept}))
    return folder


def assert_reads(opens: Opens, source: object, tensors: Mapping[str, torch.Tensor]) -> None:
    checkpoint = opens(source)
    assert checkpoint.headers.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
    checkpoint.materialize()
    checkpoint.close()


@pytest.mark.parametrize("shard_size", ["50GB", "20KB"], ids=["single", "sharded"])
def test_what_transformers_saves(tmp_path: Path, shard_size: str) -> None:
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
    )
    model = BertModel(config)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "20KB")
    assert_reads(open_checkpoint, tmp_path, model.state_dict())
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config is not None
    assert checkpoint.config["model_type"] == "bert"
    assert checkpoint.folder == tmp_path
    assert checkpoint.notes == ()
    on_disk = {path.name for path in tmp_path.iterdir()}
    assert fingerprint(checkpoint).keys() == on_disk
    assert checkpoint.identity()["files"].keys() == on_disk


def test_an_index_that_places_a_tensor_in_an_overlay(tmp_path: Path) -> None:
    """The shards still hold the older one; transformers takes the overlay's."""
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertModel(config).save_pretrained(tmp_path, max_shard_size="20KB")
    name = "encoder.layer.0.output.dense.weight"
    save_file(
        {name: torch.full((16, 32), 3.0)}, tmp_path / "model-overlay.safetensors", {"format": "pt"}
    )
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][name] = "model-overlay.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    right = BertModel.from_pretrained(tmp_path).state_dict()
    assert bool((right[name] == 3).all())
    assert_reads(open_checkpoint, tmp_path, right)
    assert f"places '{name}' in " in open_checkpoint(tmp_path).notes[0]
    # In an order in which the shard would be read after it, clients take the older one.
    (tmp_path / "model-overlay.safetensors").rename(tmp_path / "early.safetensors")
    index["weight_map"][name] = "early.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert not bool((BertModel.from_pretrained(tmp_path).state_dict()[name] == 3).any())
    with pytest.raises(CheckpointError, match="does not place there"):
        open_checkpoint(tmp_path)


def test_shards_of_torch_files(tmp_path: Path) -> None:
    torch.save(A, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(B, tmp_path / "pytorch_model-00002-of-00002.bin")
    files = {"a": "pytorch_model-00001-of-00002.bin"} | dict.fromkeys(
        B, "pytorch_model-00002-of-00002.bin"
    )
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert_reads(open_checkpoint, tmp_path, {**A, **B})


def test_the_order_of_preference(tmp_path: Path) -> None:
    torch.save(B, tmp_path / "pytorch_model.bin")
    assert_reads(open_checkpoint, tmp_path, B)
    save_file(A, tmp_path / "model.safetensors")
    assert_reads(open_checkpoint, tmp_path, A)
    assert open_checkpoint(tmp_path).notes == ()


def test_weights_left_aside_are_told(tmp_path: Path, opens: Opens) -> None:
    sharded(tmp_path)
    assert opens(tmp_path).notes == ()
    save_file(A, tmp_path / "stale.safetensors")
    (note,) = opens(tmp_path).notes
    assert "not stale.safetensors" in note
    save_file(B, tmp_path / "model.safetensors")
    assert_reads(opens, tmp_path, B)
    (note,) = opens(tmp_path).notes
    assert INDEX in note


def test_one_file_of_another_name_serves_and_several_do_not(tmp_path: Path, opens: Opens) -> None:
    save_file(A, tmp_path / "open_clip.safetensors")
    assert_reads(opens, tmp_path, A)
    assert opens(tmp_path).config is None
    save_file(B, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files.*'open_clip.safetensors'"):
        opens(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00002.safetensors",
        "diffusion_pytorch_model.fp16-00002-of-00002.safetensors",
        "pytorch_model-00001-of-00002.bin",
    ],
)
def test_a_shard_without_an_index_is_not_the_model(tmp_path: Path, name: str, opens: Opens) -> None:
    (torch.save if name.endswith(".bin") else save_file)(A, tmp_path / name)
    with pytest.raises(
        CheckpointError, match=rf"{name}, a shard of 2, .*or shards are missing, fetch"
    ):
        opens(tmp_path)
    assert set(open_checkpoint(tmp_path / name).headers) == set(
        A
    )  # as a file by itself, it is meant


def test_the_only_shard_of_one_serves_without_an_index(tmp_path: Path, opens: Opens) -> None:
    save_file(A, tmp_path / "model-00001-of-00001.safetensors")
    assert set(opens(tmp_path).headers) == set(A)


def test_folders_without_weights(tmp_path: Path, opens: Opens) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        opens(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="holds no weights"):
        opens(tmp_path)


def test_a_model_beside_an_adapter_is_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file(A, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        open_checkpoint(tmp_path)
    save_file(B, tmp_path / "model.safetensors")
    assert_reads(open_checkpoint, tmp_path, B)
    assert len(open_checkpoint(tmp_path).notes) == 1


def test_a_quantised_config_is_only_shown(tmp_path: Path, opens: Opens) -> None:
    save_file(A, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    assert opens(tmp_path).config == {"quantization_config": {"bits": 4}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "JSON list"),
        ("{", "not valid JSON"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ("\ufeff{}", "not valid JSON"),
        ('{"a": ' + "[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_config_is_an_error(tmp_path: Path, text: str, message: str, opens: Opens) -> None:
    save_file(A, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        opens(tmp_path)


SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": SHARD_1}, "'b' is in model-00001.*it is not"),
        ({"x": SHARD_1}, "'x' is in model-00001.*it is not"),
        ({"c": None}, "model-00002.*holds 'c', which"),
        ({"c": "gone.safetensors"}, r"gone\.safetensors is missing"),
        ({"c": "../outside.safetensors"}, "bare names"),
        ({"c": "/etc/passwd"}, "bare names"),
        ({"c": "sub/model.safetensors"}, "bare names"),
        ({"c": "sub\\model.safetensors"}, "bare names"),
        ({"c": "."}, "bare names"),
        ({"c": ".."}, "bare names"),
        ({"c": ""}, "bare names"),
        ({"c": "a\0b"}, "bare names"),
        ({"c": 3}, "no weight_map"),
        ({"c": INDEX}, "not a file of weights"),
    ],
    ids=str,
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, change: dict, message: str, opens: Opens
) -> None:
    save_file(B, tmp_path / "outside.safetensors")
    folder = sharded(tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=message):
        opens(folder)


def test_an_index_of_some_of_the_shards_is_refused(tmp_path: Path, opens: Opens) -> None:
    folder = sharded(tmp_path, dict.fromkeys(B))
    with pytest.raises(CheckpointError, match=r"lists 1 shard, and beside it lies 'model-00002-of"):
        opens(folder)
    second = folder / "model-00002-of-00002.safetensors"
    second.rename(folder / "other-00002-of-00002.safetensors")  # of another model, or of none
    assert set(opens(folder).headers) == set(A)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, text: str, opens: Opens) -> None:
    (sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="no weight_map"):
        opens(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, opens: Opens) -> None:
    sharded(tmp_path)
    save_file({**A, **B}, tmp_path / SHARD_2)
    with pytest.raises(CheckpointError, match=r"model-00002.*holds 'a'"):
        opens(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(A, tmp_path / "real.safetensors")
    (tmp_path / "real.json").write_text("{}")
    save_file(A, folder / "model.safetensors")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / f"real.{name.split('.')[-1]}")
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_checkpoint(folder)


def test_links_inside_the_folder_and_to_the_folder_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(A, folder / "weights.data")
    (folder / "model.safetensors").symlink_to("weights.data")
    (tmp_path / "link").symlink_to(folder)
    assert_reads(open_checkpoint, folder, A)
    assert_reads(open_checkpoint, tmp_path / "link", A)


def test_loops_and_dangling_links(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shared", [False, True], ids=["per repository", "shared store"])
def test_the_hugging_face_cache_is_followed_and_nothing_that_looks_like_it(
    tmp_path: Path, shared: bool
) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--name" / "snapshots" / "c0ffee"
    (snapshot / "1_Pooling").mkdir(parents=True)
    blobs = cache / "models--org--name" / "blobs"
    blobs.mkdir()
    if shared:
        store = cache / "blobs" / "ab" / ("ab" * 32)
        store.parent.mkdir(parents=True)
        save_file(A, store)
        (blobs / "hash").symlink_to(f"../../blobs/ab/{'ab' * 32}")
    else:
        save_file(A, blobs / "hash")
    (snapshot / "model.safetensors").symlink_to("../../blobs/hash")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/hash")
    assert_reads(open_checkpoint, snapshot, A)
    assert safe_child(snapshot / "1_Pooling", "config.json").exists()

    save_file(A, cache / "stranger")
    for target in ("../../../stranger", "../../refs/main"):
        (snapshot / "tokenizer.json").unlink(missing_ok=True)
        (snapshot / "tokenizer.json").symlink_to(target)
        with pytest.raises(CheckpointError, match="outside its folder"):
            safe_child(snapshot, "tokenizer.json")
    (blobs / "evil").symlink_to("../../stranger")
    (snapshot / "vocab.json").symlink_to("../../blobs/evil")
    with pytest.raises(CheckpointError, match="outside its folder"):
        safe_child(snapshot, "vocab.json")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("source", ["gone", "./a/b", "../a/b", "/a/b", "a/b/c", "a/b@", "a b/c"])
def test_a_missing_path_is_told(tmp_path: Path, monkeypatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(source)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(Path("org/name"))  # a Path is never an id of the Hub


def test_an_existing_path_wins_over_the_hub(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "org" / "name@v1").mkdir(parents=True)
    save_file(A, tmp_path / "org" / "name@v1" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert_reads(open_checkpoint, "org/name@v1", A)


def test_unknown_suffixes_and_names_too_long(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    with pytest.raises(CheckpointError, match=r"m\.onnx is not a file of weights"):
        open_checkpoint(tmp_path / "m.onnx")
    with pytest.raises(CheckpointError, match="pass its folder"):
        open_checkpoint(sharded(tmp_path) / INDEX)
    with pytest.raises(CheckpointError):
        open_checkpoint("x" * 5000)


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(A, tmp_path / "m.safetensors")
    assert_reads(open_checkpoint, "~/m.safetensors", A)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint("~nobody-of-this-name/m.safetensors")


def test_a_state_dict_in_memory() -> None:
    tensors = {**A, **B}
    assert_reads(open_checkpoint, tensors, tensors)
    checkpoint = open_checkpoint(tensors)
    assert (checkpoint.config, checkpoint.folder, checkpoint.notes) == (None, None, ())
    assert torch.equal(checkpoint.read("a", range(1, 3)), A["a"][1:3])
    checkpoint.read("a").fill_(-1)
    assert A["a"][0, 1] == 1
    identity = checkpoint.identity()
    assert open_checkpoint(dict(tensors)).identity() == identity
    changed = {**tensors, "c": torch.tensor(2)}
    assert open_checkpoint(changed).identity() != identity
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("a")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"w": 3}, "'w' is a int"),
        ({"w": None}, "'w' is a NoneType"),
        ({3: torch.ones(1)}, "key 3"),
        ({"w": torch.ones(2, device="meta")}, "meta"),
        ({"w": torch.eye(2).to_sparse()}, "sparse"),
    ],
    ids=str,
)
def test_a_state_dict_of_other_things_is_refused(entries: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(entries)


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("never reached")


def test_tensor_subclasses_with_a_dispatch_of_their_own_are_refused() -> None:
    wrapped = torch.Tensor._make_subclass(Wrapped, torch.ones(2))
    with pytest.raises(CheckpointError, match="Wrapped"):
        open_checkpoint({"w": wrapped})
    parameter = torch.nn.Parameter(torch.ones(2))
    assert torch.equal(open_checkpoint({"w": parameter}).read("w"), torch.ones(2))


def test_a_view_of_a_larger_tensor_is_copied_alone() -> None:
    whole = torch.randn(10, 10)
    found = open_checkpoint({"w": whole.T[2:4]}).read("w")
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == 2 * 10 * 4


def test_file_and_memory_agree(tmp_path: Path) -> None:
    save_file(B, tmp_path / "m.safetensors")
    on_disk = open_checkpoint(tmp_path / "m.safetensors")
    assert dict(on_disk.headers) == dict(open_checkpoint(B).headers)
    assert load_file(tmp_path / "m.safetensors").keys() == on_disk.headers.keys()
