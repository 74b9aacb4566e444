"""What the campaigns found, each as the smallest input, or the least of a fault, that showed it."""

import json
import os
import pickle
import signal
import tracemalloc
from collections import OrderedDict
from contextlib import contextmanager
from multiprocessing import Pipe

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckpointError, InputError, RecipeError
from covmerge.files.checkpoints.journal import Journal
from covmerge.files.checkpoints.manifest import read_manifest
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.checkpoints.staging import find_unfinished
from covmerge.files.quantised.view import dequantised
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.servers import onward
from covmerge.files.tensors.skeleton import SkeletonUnavailable, build_skeleton, refuse_many_keys
from covmerge.plan.recipe import parse_recipe
from covmerge.plan.statistics import Reading
from covmerge.plan.statistics.examples import read_texts
from covmerge.plan.vocabulary.tokens import read_tokenizer
from covmerge.run.engine.processes import _serve
from covmerge.run.engine.threads import Threads
from covmerge.run.export.companions import copy_companions
from covmerge.run.recompute import recompute
from tests.cli.runs import save_plain
from tests.mergekit.token_cases import WORDS, save_model
from tests.quantised.ggufs import save_llama
from tests.quantised.models import llama


@pytest.mark.parametrize("step", [b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 7 + b"\x7f", b"C\xff"])
def test_room_is_not_made_for_more_than_a_pickle_has(step, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x80\x04" + step + b"x")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"model.bin is cut short: a step .* 1 are left"):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_a_pickle_of_a_class_in_place_of_tensors(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps(OrderedDict))
    with pytest.raises(CheckpointError, match=r"model.bin holds a collections.OrderedDict"):
        open_checkpoint(path)


def test_a_journal_that_is_a_hole_is_not_read(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(CheckpointError, match="is larger than"):
        Journal.resume(path, plan_hash="1f")


def test_a_manifest_that_is_a_loop_of_links(tmp_path):
    (tmp_path / "covmerge.json").symlink_to("covmerge.json")
    with pytest.raises(InputError, match=r"covmerge.json cannot be read"):
        read_manifest(tmp_path)


def test_an_output_that_goes_on_after_its_tensors_is_not_hashed(tmp_path):
    save_plain(tmp_path, layers=1, width=4)
    covmerge.merge(
        tmp_path / "base.safetensors", [tmp_path / "a.safetensors"], "average", tmp_path / "out"
    )
    os.truncate(tmp_path / "out" / "model.safetensors", 2**40)
    checks = {check.name: check for check in covmerge.verify(tmp_path / "out").checks}
    assert not checks["files"].ok
    assert "model.safetensors cannot be read" in checks["files"].detail


@pytest.mark.parametrize("again", [covmerge.report, recompute])
def test_a_recipe_that_is_recorded_wrong_is_found(again, tmp_path):
    save_plain(tmp_path, layers=1, width=4)
    base = tmp_path / "base.safetensors"
    covmerge.merge(base, [tmp_path / "a.safetensors"], "task_arithmetic", tmp_path / "out")
    path = tmp_path / "out" / "covmerge.json"
    manifest = json.loads(path.read_text())
    manifest["recipe"]["parameters"] = {"x": 1}
    path.write_text(json.dumps(manifest))
    with pytest.raises(RecipeError, match=r"covmerge.json: method 'task_arithmetic' has no"):
        again(tmp_path / "out")


def test_a_source_that_is_recorded_wrong_is_found(tmp_path):
    save_plain(tmp_path, layers=1, width=4)
    base = tmp_path / "base.safetensors"
    covmerge.merge(base, [tmp_path / "a.safetensors"], "task_arithmetic", tmp_path / "out")
    path = tmp_path / "out" / "covmerge.json"
    manifest = json.loads(path.read_text())
    manifest["recipe"]["base"] = "-rf"
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"a source in .*covmerge.json: no such file or folder: -rf"
    ):
        covmerge.report(tmp_path / "out")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.json"])
def test_examples_without_an_end(name, tmp_path):
    path = tmp_path / name
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(InputError, match=rf"{name}, .*has more than \d+ (characters|bytes)"):
        read_texts(path, Reading())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_masks_over_a_model_of_another_dtype(dtype, tmp_path):
    save_plain(tmp_path, layers=1, width=4)
    base, experts = tmp_path / "base.safetensors", [tmp_path / f"{n}.safetensors" for n in "ab"]
    covmerge.merge(base, dict(zip("ab", experts, strict=True)), "emr", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    save_file({name: own.to(dtype) for name, own in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match="is not the file that the merge wrote"):
        covmerge.load_expert(tmp_path / "out", "a", base)


def test_masks_with_a_hole_are_not_hashed(tmp_path):
    save_plain(tmp_path, layers=1, width=4)
    base, experts = tmp_path / "base.safetensors", [tmp_path / f"{n}.safetensors" for n in "ab"]
    covmerge.merge(base, dict(zip("ab", experts, strict=True)), "emr", tmp_path / "out")
    os.truncate(tmp_path / "out" / "masks" / "a.safetensors", 2**40)
    told = (
        r"masks/a.safetensors is not the file that the merge wrote \(.* is 1099511627776 bytes long"
    )
    with pytest.raises(CheckpointError, match=told):
        covmerge.load_expert(tmp_path / "out", "a", base)


def test_a_range_of_layers_without_an_end():
    slices = [{"experts": {"a": [[0, 2]]}}]
    with pytest.raises(RecipeError, match=r"is too short: it lacks entry 2"):
        parse_recipe({"base": "b", "experts": {"a": "x"}, "method": "linear", "slices": slices})


def test_messages_have_an_end(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"plan": "1f", "format": [' + "0," * 100_000 + "0]}\n")
    with pytest.raises(CheckpointError, match=r"start over with overwrite=True$") as caught:
        Journal.resume(path, plan_hash="1f")
    assert "journal.jsonl has format" in str(caught.value)
    assert len(str(caught.value)) < 3100


def test_names_of_a_gguf_file_are_not_looked_for_in_every_module(tmp_path, monkeypatch):
    from transformers import modeling_gguf_pytorch_utils as loader

    model = llama(1, vocab_size=8, hidden_size=32, intermediate_size=32)
    path = save_llama(model, tmp_path / "model.gguf", "F16")
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_norm", b"blk.0.attn_none"))
    looked, real = [], loader.get_gguf_hf_weights_map

    def counted(*given, **named):
        looked.append(given)
        return real(*given, **named)

    monkeypatch.setattr(loader, "get_gguf_hf_weights_map", counted)
    with pytest.raises(CheckpointError, match=r"no parameter for 'blk.0.attn_none.weight'"):
        dequantised(open_checkpoint(path))
    assert len(looked) < 10


def test_a_tokenizer_that_makes_a_library_panic(tmp_path):
    name, words = "llama", WORDS["base"]
    save_model(tmp_path / "base", name, "base", words)
    path = tmp_path / "base" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = "longer than any token"
    path.write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=r"base: transformers cannot load its tokenizer .*panicked"
    ):
        read_tokenizer(tmp_path / "base", {})


def test_a_config_of_very_many_keys_is_not_built():
    config = {"model_type": "gpt2", **{f"k{number}": 0 for number in range(50_001)}}
    with pytest.raises(SkeletonUnavailable, match=r"config.json has 50002 keys"):
        build_skeleton({}, config)
    packed = {
        "model_type": "gpt2",
        "n_layer": 0,
        "quantization_config": {str(n): 0 for n in range(60_000)},
    }
    refuse_many_keys(packed)


@pytest.mark.parametrize(
    "location",
    [
        *("http://example.org/a", "file:///etc/passwd", "https://user@example.org/", "//[x/"),
        *("https://127.0.0.1/", "https://[::ffff:10.0.0.1]/", "https://2130706433/"),
        *(
            "https://LOCALHOST./",
            "https://a.localhost/",
            "https://\N{FULLWIDTH LATIN SMALL LETTER L}ocalhost/",
        ),
    ],
)
def test_where_a_server_may_not_lead(location):
    with pytest.raises(OSError, match="the server leads to"):
        onward("https://example.org/a", location)


def test_where_a_server_may_lead():
    assert onward("https://example.org/a/b", "c?x=%2F#d") == "https://example.org/a/c?x=%2F"
    assert (
        onward("http://example.org/a", "https://cdn.example.net/a") == "https://cdn.example.net/a"
    )
    assert onward("http://127.0.0.1:5/a", "http://127.0.0.1:6/b") == "http://127.0.0.1:6/b"


@pytest.mark.parametrize("flag", [None, "resume", "overwrite"])
def test_a_journal_that_a_kill_left_half_made(flag, tmp_path):
    save_plain(tmp_path, layers=1, width=4)
    partial = tmp_path / ".out.covmerge-partial"
    partial.mkdir()
    (partial / ".journal.jsonl.new").write_bytes(b'{"plan":"1f')
    base, experts = tmp_path / "base.safetensors", [tmp_path / "a.safetensors"]
    covmerge.merge(base, experts, "average", tmp_path / "out", **({flag: True} if flag else {}))
    assert not partial.exists()
    assert covmerge.verify(tmp_path / "out").ok


def test_an_output_whose_merge_was_killed_as_it_cleaned_up_is_finished(tmp_path):
    aside = tmp_path / ".out.covmerge-partial"
    (aside / "replaced").mkdir(parents=True)
    for name in ("lock", "journal.jsonl"):
        (aside / name).touch()
    assert find_unfinished(tmp_path / "out") is None
    (aside / "output").mkdir()
    assert find_unfinished(tmp_path / "out") == aside


def test_a_folder_of_the_base_that_is_gone_by_the_time_it_is_copied(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read the folder .*base: No such file"):
        copy_companions(tmp_path / "base", LocalFolder(tmp_path))


def test_a_worker_whose_parent_was_killed_ends_without_a_traceback(tmp_path):
    ours, theirs = Pipe()

    @contextmanager
    def opener():
        ours.close()
        raise InputError("a source changed")
        yield

    before = signal.getsignal(signal.SIGINT)
    try:
        inner = Threads(in_flight=2**20, lanes=1)
        _serve(theirs, opener, torch.device("cpu"), 1, str(tmp_path / "alone"), inner, "python")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "dtype, said",
    [("float64", "no number in float64 is the square norm"), ("float32", "--dtype|float64")],
)
def test_updates_whose_squares_no_number_holds(tmp_path, dtype, said):
    base, expert = tmp_path / "base.safetensors", tmp_path / "a.safetensors"
    save_file({"a.weight": torch.ones(2, 2, dtype=torch.float64)}, base)
    save_file({"a.weight": torch.full((2, 2), 1e200, dtype=torch.float64)}, expert)
    with pytest.raises(InputError, match=f"'a.weight' of expert 'expert1' .*{said}"):
        covmerge.merge(base, [expert], "average", tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_recorded_recipe_that_gives_no_numbers(tmp_path):
    save_plain(tmp_path, layers=1, width=4)
    experts = [tmp_path / "a.safetensors"]
    covmerge.merge(tmp_path / "base.safetensors", experts, "task_arithmetic", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "covmerge.json").read_text())
    record["recipe"]["parameters"] = {"scale": 1e300}
    (tmp_path / "out" / "covmerge.json").write_text(json.dumps(record))
    with pytest.raises(
        CheckpointError, match=r"out cannot be computed again by the recipe in its covm"
    ):
        recompute(tmp_path / "out")
