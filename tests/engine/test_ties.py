"""Tied tensors that are stored twice: one stands for both, if they are one."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import TensorError
from tests.e2e.models import save_family


@pytest.fixture
def stored_twice(tmp_path):
    base, experts = save_family("gpt2", tmp_path, experts=2)
    for path in (base, *experts.values()):
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return base, experts


def test_written_once(stored_twice, tmp_path):
    base, experts = stored_twice
    result = covmerge.merge(base, experts, "average")
    assert "lm_head.weight" not in result.tensors
    assert any("written once" in note for note in result.notes)


def test_different_values_are_refused(stored_twice):
    base, experts = stored_twice
    path = experts["e2"] / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] += torch.ones(1)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(TensorError, match=r"ties 'lm_head.weight'.*differ.*tie_word_embeddings"):
        covmerge.merge(base, experts, "average")
