"""The real client of the Hub against a Hub of one repository on this machine."""

import json
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_hub_download
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.base import fingerprint
from covmerge.files.checkpoints.folder import open_folder
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.quantised.view import open_plain
from covmerge.files.stores.hub import HubStore
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.store import StoredFile, child
from tests.advised import advice
from tests.checkpoints.hub_server import COMMIT, Hub, connect, serve
from tests.quantised.ggufs import save_llama

ROWS = 4000
TENSORS = {
    "a": torch.arange(ROWS * 100, dtype=torch.float32).reshape(ROWS, 100),
    "b": (torch.arange(ROWS * 50) % 7).half().reshape(ROWS, 50),
    "c": torch.tensor(5),
}
SHARDS = {"a": "model-00001-of-00002.safetensors"} | dict.fromkeys(
    "bc", "model-00002-of-00002.safetensors"
)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    """Folder that becomes the repository; beside the weights, files to download and not to."""
    folder = tmp_path / "upload"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "onnx").mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "vocab.txt").write_text("[PAD]\n")
    (folder / "1_Pooling" / "config.json").write_text("{}")
    for name in ("README.md", "modeling_custom.py", "tf_model.h5", "onnx/model.onnx"):
        (folder / name).write_text("not wanted")
    (folder / "2_Dense").mkdir()
    save_file({"x": torch.ones(1)}, folder / "2_Dense" / "model.safetensors")
    return folder


@pytest.fixture
def hub(upload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(upload) as hub:
        connect(monkeypatch, hub, tmp_path / "cache")
        yield hub


@pytest.fixture
def single(upload: Path) -> None:
    save_file(TENSORS, upload / "model.safetensors")
    save_file({"x": torch.ones(1)}, upload / "other.safetensors")
    torch.save(TENSORS, upload / "pytorch_model.bin")


@pytest.fixture
def sharded(upload: Path) -> None:
    for file in set(SHARDS.values()):
        save_file({n: TENSORS[n] for n in SHARDS if SHARDS[n] == file}, upload / file)
    (upload / INDEX).write_text(json.dumps({"weight_map": SHARDS}))


def weights_sent(hub: Hub) -> int:
    return sum(size for name, size in hub.sent.items() if not name.endswith((".json", ".txt")))


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_planning_transfers_headers_and_materialize_the_rest(
    request: pytest.FixtureRequest, kind: str
) -> None:
    request.getfixturevalue(kind)
    hub: Hub = request.getfixturevalue("hub")
    files = {"model.safetensors"} if kind == "single" else set(SHARDS.values())

    checkpoint = open_checkpoint("org/name@v1")
    assert {n: (h.shape, h.dtype) for n, h in checkpoint.headers.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()
    }
    assert checkpoint.config == {"model_type": "bert"}
    assert checkpoint.source == "org/name@v1"
    assert checkpoint.folder is None
    assert hub.sent.keys() == {"config.json", *files} | ({INDEX} if kind == "sharded" else set())
    assert weights_sent(hub) <= 100_000 * len(files)
    identity = checkpoint.identity()
    assert identity == {"kind": "hub", "repo": "org/name", "revision": COMMIT}
    assert fingerprint(checkpoint) == {"revision": COMMIT}
    with pytest.raises(CheckpointError, match=advice("not downloaded: call materialize() first")):
        checkpoint.read("a")

    checkpoint.materialize()
    checkpoint.materialize()
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert torch.equal(checkpoint.read("a", range(17, 30)), TENSORS["a"][17:30])
    assert checkpoint.identity() == identity
    assert checkpoint.hub == HubModel("org/name", COMMIT)
    assert checkpoint.folder is not None
    assert {
        path.relative_to(checkpoint.folder).as_posix()
        for path in checkpoint.folder.rglob("*")
        if not path.is_dir()
    } == files | {"config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"} | (
        {INDEX} if kind == "sharded" else set()
    )
    checkpoint.close()


@pytest.mark.parametrize("source", ["org/name", f"org/name@{COMMIT}", "org/name@refs/pr/1"])
def test_revisions_resolve_to_a_commit(single: None, hub: Hub, source: str) -> None:
    assert fingerprint(open_checkpoint(source)) == {"revision": COMMIT}


def test_companions_are_fetched_without_weights(single: None, hub: Hub) -> None:
    checkpoint = open_checkpoint("org/name@v1")
    before = weights_sent(hub)
    folder = checkpoint.companions()
    assert folder is not None
    assert (folder / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert weights_sent(hub) == before
    assert checkpoint.folder is None
    checkpoint.materialize()
    assert checkpoint.companions() == checkpoint.folder


def test_weights_left_aside_are_told(single: None, hub: Hub) -> None:
    (note,) = open_checkpoint("org/name").notes
    assert "not other.safetensors" in note


def test_a_server_without_ranges_does_not_send_the_whole_file(single: None, hub: Hub) -> None:
    hub.ranges = False
    assert open_checkpoint("org/name").headers.keys() == TENSORS.keys()


def test_a_long_header_takes_a_second_request(upload: Path, request) -> None:
    tensors = {f"layer.{i}.{'x' * 60}": torch.zeros(1) for i in range(1500)}
    save_file(tensors, upload / "model.safetensors")
    hub: Hub = request.getfixturevalue("hub")
    assert open_checkpoint("org/name").headers.keys() == tensors.keys()
    assert hub.sent["model.safetensors"] > 100_000


def test_a_hostile_header_is_refused_before_the_download(upload: Path, request) -> None:
    (upload / "model.safetensors").write_bytes(b"\xff" * 20)
    request.getfixturevalue("hub")
    with pytest.raises(CheckpointError, match=r"org/name: model\.safetensors claims a header"):
        open_checkpoint("org/name")


def test_shards_that_contradict_the_index(sharded: None, upload: Path, request) -> None:
    (upload / INDEX).write_text(json.dumps({"weight_map": {**SHARDS, "x": SHARDS["a"]}}))
    hub: Hub = request.getfixturevalue("hub")
    with pytest.raises(CheckpointError, match="'x' is in model-00001"):
        open_checkpoint("org/name")
    del hub.files[SHARDS["a"]]
    with pytest.raises(CheckpointError, match=r"no file 'model-00001.*incomplete"):
        open_checkpoint("org/name")


@pytest.mark.parametrize("name", [SHARDS["a"], "pytorch_model-00001-of-00002.bin"])
def test_a_shard_without_an_index_is_not_the_model(upload: Path, request, name: str) -> None:
    (torch.save if name.endswith(".bin") else save_file)(TENSORS, upload / name)
    request.getfixturevalue("hub")
    with pytest.raises(CheckpointError, match=f"org/name holds {name}, a shard of 2"):
        open_checkpoint("org/name")


@pytest.mark.parametrize("file", ["2_Dense/model.safetensors", "../model.safetensors"])
def test_shards_in_other_folders_are_refused(sharded: None, upload: Path, request, file) -> None:
    (upload / INDEX).write_text(json.dumps({"weight_map": {**SHARDS, "x": file}}))
    request.getfixturevalue("hub")
    with pytest.raises(CheckpointError, match=f"no file '{file}'"):
        open_checkpoint("org/name")


def test_an_empty_file_is_refused(upload: Path, request) -> None:
    (upload / "model.safetensors").touch()
    request.getfixturevalue("hub")
    with pytest.raises(CheckpointError, match=r"org/name: model\.safetensors is 0 bytes"):
        open_checkpoint("org/name")


def test_a_config_of_impossible_size_is_not_downloaded(single: None, hub: Hub) -> None:
    hub.listed["config.json"] = 10**9
    with pytest.raises(CheckpointError, match="1000000000 bytes"):
        open_checkpoint("org/name")
    assert "config.json" not in hub.sent


def test_a_push_between_planning_and_download_is_noticed(single: None, hub: Hub) -> None:
    checkpoint = open_checkpoint("org/name")
    whole = hub.files["model.safetensors"]
    hub.files["model.safetensors"] = whole.replace(b'"a"', b'"A"', 1)
    said = advice("{}: {} holds other tensors than the Hub announced: delete {} and start again")
    with pytest.raises(CheckpointError, match=said) as told:
        checkpoint.materialize()
    hub.files["model.safetensors"] = whole
    found = re.search(r"delete (\S+) and start again", str(told.value))
    assert found is not None
    shutil.rmtree(found[1])
    again = open_checkpoint("org/name")
    again.materialize()
    assert torch.equal(again.read("a"), TENSORS["a"])


@pytest.mark.parametrize("most", [0, 5], ids=["single", "in parts"])
def test_a_model_in_gguf_is_downloaded_at_once(upload: Path, request, most: int) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    config = LlamaConfig(**sizes, vocab_size=8, num_hidden_layers=1)
    save_llama(LlamaForCausalLM(config), upload / "model.gguf", "F32", most=most)
    (upload / "config.json").write_text(config.to_json_string())
    request.getfixturevalue("hub")
    checkpoint = open_plain("org/name")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(checkpoint.read(name), open_plain(upload).read(name))
    assert "no safetensors of it: its weights were downloaded" in checkpoint.notes[0]
    checkpoint.close()


def test_one_of_several_files_is_downloaded_and_passed(upload: Path, request) -> None:
    for name in ("a", "b"):
        save_file({name: TENSORS[name]}, upload / f"{name}.safetensors")
    request.getfixturevalue("hub")
    said = advice(
        "`hf download NAME FILE` gets one file of a model of the Hub, and prints its path"
    )
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint("org/name")
    checkpoint = open_checkpoint(hf_hub_download("org/name", "b.safetensors"))
    assert torch.equal(checkpoint.read("b"), TENSORS["b"])


@pytest.mark.parametrize("indexed", [False, True], ids=["single", "sharded"])
def test_pickled_weights_are_downloaded_at_once_and_said_so(
    upload: Path, request, indexed: bool
) -> None:
    torch.save(TENSORS, upload / f"pytorch_model{'-1' if indexed else ''}.bin")
    (upload / "training_args.bin").write_text("not wanted")
    if indexed:
        files = dict.fromkeys(TENSORS, "pytorch_model-1.bin")
        (upload / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    hub: Hub = request.getfixturevalue("hub")
    checkpoint = open_checkpoint("org/name")
    assert torch.equal(checkpoint.read("a"), TENSORS["a"])
    assert "no safetensors" in checkpoint.notes[0]
    assert checkpoint.config == {"model_type": "bert"}
    assert "training_args.bin" not in hub.sent
    checkpoint.close()


def test_an_adapter_of_an_unknown_kind_is_refused(upload: Path, request) -> None:
    (upload / "adapter_config.json").write_text("{}")
    save_file(TENSORS, upload / "adapter_model.safetensors")
    request.getfixturevalue("hub")
    with pytest.raises(CheckpointError, match=r"org/name is an adapter.*merge_and_unload"):
        open_checkpoint("org/name")


def test_offline_the_cache_is_used_and_said_so(single: None, hub: Hub, monkeypatch) -> None:
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        said = advice(
            "run `hf download {}` where there is a connection, or name the commit that is in"
        )
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint("org/name@main")
    # The client keeps which commit a branch was at only when it resolved the branch itself.
    open_checkpoint(f"org/name@{COMMIT}").materialize()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.sent.clear()
    checkpoint = open_checkpoint(f"org/name@{COMMIT}")
    assert torch.equal(checkpoint.read("b"), TENSORS["b"])
    assert "HF_HUB_OFFLINE" in checkpoint.notes[0]
    assert checkpoint.identity() == {"kind": "hub", "repo": "org/name", "revision": COMMIT}
    assert hub.sent == {}


def test_the_model_card_is_fetched_when_it_is_asked_for(
    single: None, hub: Hub, monkeypatch
) -> None:
    checkpoint = open_checkpoint("org/name")
    assert "README.md" not in hub.sent
    card = checkpoint.readme()
    assert card is not None and card.read_text() == "not wanted"
    checkpoint.materialize()
    sent = dict(hub.sent)
    assert checkpoint.readme() == card
    assert hub.sent == sent  # nothing was asked for twice
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = open_checkpoint(f"org/name@{COMMIT}")
    assert offline.readme() == card
    # Its folder, opened as such or through a link, is known for what it is.
    assert checkpoint.folder is not None
    link = checkpoint.folder.parents[3] / "link"
    link.symlink_to(checkpoint.folder)
    for folder in (checkpoint.folder, link):
        assert open_checkpoint(folder).hub == HubModel("org/name", COMMIT)
        assert open_checkpoint(folder).readme() == folder / "README.md"
    del hub.files["README.md"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert open_checkpoint("org/name").readme() is None


def test_a_repository_is_read_by_ranges(single: None, hub: Hub, upload: Path) -> None:
    store = HubStore.find("org/name", "org/name", None)
    whole = (upload / "model.safetensors").read_bytes()
    assert store.names() == [name for name in hub.files if "/" not in name]
    assert store.inside("1_Pooling").names() == ["config.json"]
    assert StoredFile(store.inside("1_Pooling"), "config.json").read(10) == b"{}"
    size, _, _ = store.stamp("model.safetensors")
    assert size == len(whole) and "model.safetensors" not in hub.sent
    target = bytearray(500_000)
    with store.open("model.safetensors") as opened:
        assert opened.read_at(memoryview(target), 300_000) == len(target)
        assert target == whole[300_000:800_000]
        assert hub.sent["model.safetensors"] <= len(target)  # no more than was asked for
        for _ in range(3):  # a small one reads ahead, and what was read is not asked for again
            assert opened.read_at(memoryview(target)[:8], 40) == 8 and target[:8] == whole[40:48]
            assert hub.sent["model.safetensors"] <= len(target) + 100_000
        assert opened.read_at(memoryview(target), size - 3) == 3 and target[:3] == whole[-3:]
        assert opened.read_at(memoryview(target), size) == 0


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "whole files"])
def test_tensors_are_read_where_they_lie(sharded: None, hub: Hub, ranges: bool) -> None:
    hub.ranges = ranges
    checkpoint = open_folder("org/name", HubStore.find("org/name", "org/name", None))
    assert torch.equal(checkpoint.read("a", range(17, 30)), TENSORS["a"][17:30])
    assert torch.equal(checkpoint.read("b", range(3999, 4000)), TENSORS["b"][3999:])
    assert torch.equal(checkpoint.read("c"), TENSORS["c"])
    assert checkpoint.folder is None


def test_another_range_than_was_asked_for_is_refused(single: None, hub: Hub, upload) -> None:
    store = HubStore.find("org/name", "org/name", None)
    hub.shifted = 1
    with pytest.raises(CheckpointError, match=r"asked for bytes from 40, sent .*'bytes 41-"):
        store.fetch("model.safetensors", 40, 8)
    hub.shifted = 0
    hub.files["model.safetensors"] = hub.files["model.safetensors"][:44]
    said = advice("{}: the Hub sent {} bytes of {} where {} were asked for: try again")
    whole = upload / "model.safetensors"
    with pytest.raises(CheckpointError, match=said):
        store.fetch("model.safetensors", 40, 8)
    hub.files["model.safetensors"] = whole.read_bytes()
    assert store.fetch("model.safetensors", 40, 8) == whole.read_bytes()[40:48]


@pytest.mark.parametrize("name", ["../config.json", "1_Pooling/config.json", "/etc/passwd", "gone"])
def test_a_strangers_name_stays_inside_the_repository(single: None, hub: Hub, name: str) -> None:
    store = HubStore.find("org/name", "org/name", None)
    with pytest.raises(CheckpointError, match=f"org/name has no file '{name}'"):
        child(store, name)
    assert hub.sent == {}


def test_where_a_repository_is_may_be_sent_to_another_process(single: None, hub: Hub) -> None:
    store = pickle.loads(pickle.dumps(HubStore.find("org/name", "org/name", "v1")))
    assert store.commit == COMMIT
    assert StoredFile(store, "config.json").read(100) == hub.files["config.json"]


def test_unknown_names_and_refusals_are_told_apart(single: None, hub: Hub, monkeypatch) -> None:
    said = advice(
        "or not for you: correct the name, or log in with `hf auth login` if it is private"
    )
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint("org/gone")
    with pytest.raises(CheckpointError, match=advice("on {} has no revision '{}': correct it")):
        open_checkpoint("org/name@v9")
    hub.gated = True
    said = advice("{} is gated: accept its terms at {}/{}, and log in with `hf auth login`")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint("org/name")
    with pytest.raises(CheckpointError, match="org/na--me is no file or folder here, and"):
        open_checkpoint("org/na--me")
    hub.gated = False  # for who accepted
    for source in ("org/name", "org/name@v1"):
        assert open_checkpoint(source).headers.keys() == TENSORS.keys()


def test_an_endpoint_out_of_reach_is_named(single: None, hub: Hub, monkeypatch) -> None:
    said = advice(
        "correct the path, check the connection, or set HF_HUB_OFFLINE=1 to use the copy in"
    )
    source = f"org/name@{COMMIT}"
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(CheckpointError, match=said) as told:
            open_checkpoint(source)
        assert "http://127.0.0.1:9" in str(told.value)
    open_checkpoint(source).materialize()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(source).headers.keys() == TENSORS.keys()


def test_a_download_that_breaks_off_is_told(single: None, hub: Hub) -> None:
    checkpoint = open_checkpoint("org/name")
    hub.gated = True
    with pytest.raises(CheckpointError, match="org/name is gated"):
        checkpoint.materialize()
    hub.gated = False
    checkpoint.readme()
    hub.gated = True  # the client now returns without a word what its cache has
    said = advice(
        "the Hub did not give {} of {} files, {} among them: check the connection and `hf au"
    )
    with pytest.raises(CheckpointError, match=said):
        checkpoint.materialize()
    assert checkpoint.folder is None
    hub.gated = False
    again = open_checkpoint("org/name")
    again.materialize()
    assert torch.equal(again.read("a"), TENSORS["a"])


def test_a_file_that_the_client_keeps_in_another_length_is_told(single: None, hub: Hub) -> None:
    checkpoint = open_checkpoint("org/name")
    whole = hub.files["model.safetensors"]
    hub.files["model.safetensors"] = whole + b"more"
    said = advice("{} has {} bytes, and the client's cache holds {}: delete {} and start again")
    with pytest.raises(CheckpointError, match=said) as told:
        checkpoint.materialize()
    hub.files["model.safetensors"] = whole
    found = re.search(r"delete (\S+) and start again", str(told.value))
    assert found is not None
    Path(found[1]).unlink()
    again = open_checkpoint("org/name")
    again.materialize()
    assert torch.equal(again.read("a"), TENSORS["a"])


def test_without_the_client_the_extra_is_named(single: None, hub: Hub, monkeypatch) -> None:
    said = advice("If it is a model of the Hugging Face Hub: pip install covmerge[hub]")
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint("org/name")
    assert open_checkpoint("org/name").headers.keys() == TENSORS.keys()
