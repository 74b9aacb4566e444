"""What the campaign of hostile inputs found, each as the smallest input that showed it."""

import json
import os
import pickle
import tracemalloc
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.checkpoints import Journal, open_checkpoint
from covmerge.checkpoints.manifest import read_manifest
from covmerge.errors import CheckpointError, InputError, RecipeError
from covmerge.export.generation import notes_on_generation
from covmerge.quantised import dequantised
from covmerge.recipe import parse_recipe
from covmerge.recompute import recompute
from covmerge.statistics import Reading
from covmerge.statistics.examples import read_texts
from tests.cli.runs import save_plain
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


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.json"])
def test_examples_without_an_end(name, tmp_path):
    path = tmp_path / name
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(InputError, match=rf"{name}, .*has more than \d+ characters"):
        read_texts(path, Reading())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_masks_over_a_model_of_another_dtype(dtype, tmp_path):
    save_plain(tmp_path, layers=1, width=4)
    base, experts = tmp_path / "base.safetensors", [tmp_path / f"{n}.safetensors" for n in "ab"]
    covmerge.merge(base, dict(zip("ab", experts, strict=True)), "emr", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    save_file({name: own.to(dtype) for name, own in load_file(path).items()}, path)
    if dtype.is_floating_point:
        loaded = covmerge.load_expert(tmp_path / "out", "a", base)
        assert {own.dtype for own in loaded.values()} == {dtype}
    else:
        with pytest.raises(CheckpointError, match="does not fit the model"):
            covmerge.load_expert(tmp_path / "out", "a", base)


def test_a_range_of_layers_without_an_end():
    slices = [{"experts": {"a": [[0, 2]]}}]
    with pytest.raises(RecipeError, match=r"is too short: it lacks entry 2"):
        parse_recipe({"base": "b", "experts": {"a": "x"}, "method": "linear", "slices": slices})


def test_messages_have_an_end(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"plan": "1f", "format": [' + "0," * 100_000 + "0]}\n")
    with pytest.raises(CheckpointError, match=r"start over with --overwrite$") as caught:
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


def test_generation_settings_behind_a_link_out_of_the_folder(tmp_path):
    for name in ("base", "expert"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret.json").write_text('{"top_k": 5}')
    (tmp_path / "base" / "generation_config.json").write_text('{"top_k": 1}')
    (tmp_path / "expert" / "generation_config.json").symlink_to(tmp_path / "secret.json")
    (note,) = notes_on_generation(tmp_path / "base", {"a": tmp_path / "expert"})
    assert note.startswith("generation settings were not compared") and "top_k" not in note
