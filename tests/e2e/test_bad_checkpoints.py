"""Checkpoints that cannot be merged: exit code 2, a message that says why, nothing left behind.

Each case damages one real checkpoint of a tiny BERT; tests/cli covers bad flags and recipes.
"""

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.runs import covmerge
from tests.e2e.models import build, fine_tuned, save_family

WEIGHT = "encoder.layer.0.output.dense.weight"


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def another_architecture(folder):
    model = fine_tuned(build("gpt2"), seed=1)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)


def nan(folder):
    edit(folder, lambda t: t[WEIGHT].view(-1)[7].fill_(float("nan")))


def missing(folder):
    edit(folder, lambda t: t.pop(WEIGHT))


def extra(folder):
    edit(folder, lambda t: t.update({"encoder.layer.9.output.dense.weight": torch.ones(2, 2)}))


def shape(folder):
    edit(folder, lambda t: t.update({WEIGHT: torch.ones(5, 16)}))


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def truncated_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def oversized_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


def index_outside(folder):
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {WEIGHT: "../../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def pickled_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Payload(folder / "executed")}, folder / "pytorch_model.bin")


def bare_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(folder / "executed")))


def quantised(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


def adapter(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')


CASES = {
    another_architecture: "is a 'gpt2' model, the base",
    nan: f"'{WEIGHT}' of expert 'e2' holds 1 NaN or Inf values, the first at [0, 7]",
    missing: f"lacks 1 of the base's tensors: '{WEIGHT}'",
    extra: "that the base",
    shape: f"'{WEIGHT}' is [16, 24] in the base and [5, 16] in expert 'e2'",
    truncated: "model.safetensors",
    truncated_header: "model.safetensors",
    oversized_header: "1152921504606846976",
    index_outside: "outside.safetensors",
    pickled_code: "mkdir",
    bare_pickle: "pytorch_model.bin",
    quantised: "quantization_config",
    adapter: "PREFIX_TUNING",
}


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_bad_checkpoint(damage, tmp_path):
    base, experts = save_family("bert", tmp_path, experts=2)
    damage(experts["e2"])
    before = sorted(tmp_path.iterdir())
    flags = [f"--expert={name}={path}" for name, path in experts.items()]
    ran = covmerge("merge", "--base", base, *flags, tmp_path / "out", code=2)
    assert CASES[damage] in " ".join(ran.stderr.split()), ran.stderr
    assert "Traceback" not in ran.stderr
    assert sorted(tmp_path.iterdir()) == before
    assert not (experts["e2"] / "executed").exists()


def test_a_base_that_is_not_finite_is_helped_by_no_rule(tmp_path):
    base, experts = save_family("bert", tmp_path, experts=2)
    nan(base)
    flags = [f"--expert={name}={path}" for name, path in experts.items()]
    ran = covmerge("merge", "--base", base, *flags, tmp_path / "out", code=2)
    assert f"'{WEIGHT}' of the base holds 1 NaN or Inf" in " ".join(ran.stderr.split())
    assert "Fetch the checkpoint again." in " ".join(ran.stderr.split())
    assert "rule" not in ran.stderr


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_the_dry_run_finds_what_headers_show(damage, tmp_path):
    base, experts = save_family("bert", tmp_path, experts=2)
    damage(experts["e2"])
    flags = [f"--expert={name}={path}" for name, path in experts.items()]
    # NaN lies in the values, which a dry run does not read.
    covmerge("merge", "--base", base, *flags, "--dry-run", code=0 if damage is nan else 2)


def test_unreadable_hub_id(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    ran = covmerge("merge", "--base=nobody/nothing@main", "--expert=a=nobody/else", "out", code=2)
    assert "nobody/nothing" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_an_input(tmp_path):
    base, experts = save_family("bert", tmp_path, experts=1)
    ran = covmerge("merge", "--base", base, f"--expert=a={experts['e1']}", experts["e1"], code=2)
    assert "overlap" in ran.stderr
    assert (experts["e1"] / "model.safetensors").exists()
