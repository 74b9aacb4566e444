"""Adapters of AdapterHub's library: what it computes before it merges anything, or a refusal by name.

The files are those of adapters 1.3.0 (`lab/benchmarks/adapterhub.py`).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

import covmerge
from covmerge.errors import CheckpointError
from tests.advised import advice

FILES = Path(__file__).parents[1] / "golden" / "adapterhub"


def computes(kind, expert, out):
    """Check that a merge computes what the library computes in float64 with an adapter of this kind.

    Only the merged weights are rounded to float32, by at most 2^-24 of each, and the outputs are below 3.
    The adapters move the outputs by 5e-4 and 1e-2.
    """
    covmerge.merge(FILES / "base", {"a": expert}, out=out)
    found = BertModel.from_pretrained(out).double().eval()(torch.arange(10)[None])
    right = load_file(FILES / "outputs.safetensors")[kind]
    torch.testing.assert_close(found.last_hidden_state, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_the_model_computes_what_the_library_computed(kind, tmp_path):
    computes(kind, FILES / kind, tmp_path / "out")


def test_two_kinds_become_one_adapter_of_peft(tmp_path):
    experts = {kind: FILES / kind for kind in ("lora", "ia3")}
    found = covmerge.merge(FILES / "base", experts, "linear").tensors
    parts = [covmerge.merge(FILES / "base", {"a": FILES / kind}).tensors for kind in experts]
    for name, value in found.items():
        torch.testing.assert_close(value, (parts[0][name] + parts[1][name]) / 2)


@pytest.fixture
def lora(tmp_path):
    return Path(shutil.copytree(FILES / "lora", tmp_path / "lora"))


def changed(folder, **settings):
    file = folder / "adapter_config.json"
    fields = json.loads(file.read_text())
    fields["config"] |= settings
    file.write_text(json.dumps(fields))


def refused(folder, said):
    with pytest.raises(CheckpointError, match=said) as error:
        covmerge.merge(FILES / "base", {"a": folder})
    return str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{"architecture": "prefix_tuning"}, {"architecture": None}, {"use_gating": True}],
)
def test_what_is_no_weight(lora, settings):
    changed(lora, **settings)
    said = advice("train LoRA instead. Such an adapter is no change of the base's weights")
    assert f"with {next(iter(settings))} = " in refused(lora, said)


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"vera_b": 0.1, "vera_d": 0.1}, {"composition_mode": "scale"}]
)
def test_what_the_library_merges_itself(lora, settings, tmp_path):
    changed(lora, **settings)
    said = advice(
        "merge it into its base with adapters (model.load_adapter(FOLDER), model.merge_adapter(NAME), "
        "model.delete_adapter(NAME), model.save_pretrained(NEW)), and merge NEW as a full model"
    )
    refused(lora, said)
    computes("lora", FILES / "merged", tmp_path / "out")


def test_factors_of_a_fused_projection(lora):
    changed(lora, r=1)
    assert "is no factor of a layer of rank 1" in refused(lora, "rank 1")


def test_two_adapters_in_one_file(lora):
    file = lora / "pytorch_adapter.bin"
    tensors = torch.load(file, weights_only=True)
    torch.save({**tensors, **{n.replace(".lora.", ".b."): t for n, t in tensors.items()}}, file)
    refused(lora, advice("save each to a folder of its own, model.save_adapter(FOLDER, NAME)"))


def test_its_head_is_named(lora):
    save_file({"weight": torch.ones(1)}, lora / "model_head.safetensors")
    notes = covmerge.merge(FILES / "base", {"a": lora}).notes
    assert any("the head model_head.safetensors was not read" in note for note in notes)


def test_safetensors(lora, tmp_path):
    file = lora / "pytorch_adapter.bin"
    save_file(torch.load(file, weights_only=True), lora / "adapter.safetensors")
    file.unlink()
    found = covmerge.merge(FILES / "base", {"a": lora}).tensors
    for name, value in covmerge.merge(FILES / "base", {"a": FILES / "lora"}).tensors.items():
        assert torch.equal(found[name], value)
