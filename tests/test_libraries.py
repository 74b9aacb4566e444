"""docs/libraries.md: its rows name tests that exist, and what has no other place is tested here."""

import copy
import re
from pathlib import Path

import pytest
import torch
from peft import OFTConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

import covmerge
from covmerge.errors import CheckpointError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "libraries.md").read_text()


def test_what_the_page_names_exists():
    named = re.findall(r"`((?:tests|findings|lab)/[\w/.-]+?\.(?:py|sh|json))(?:::(\w+))?`", PAGE)
    assert len(named) > 20
    for file, test in named:
        assert not test or f"def {test}(" in (ROOT / file).read_text(), (file, test)
        assert (ROOT / file).is_file(), file


def test_transposed_and_strided_tensors_are_written_by_their_values(tmp_path):
    """safetensors' numpy writer stores the memory's order of such arrays."""
    base = {"h.0.fc.weight": torch.randn(4, 6), "h.1.fc.weight": torch.randn(6, 6)}
    right = {name: tensor + 1 for name, tensor in base.items()}
    expert = {
        "h.0.fc.weight": right["h.0.fc.weight"].T.contiguous().T,
        "h.1.fc.weight": torch.stack([right["h.1.fc.weight"]] * 2, dim=2)[:, :, 0],
    }
    assert not any(tensor.is_contiguous() for tensor in expert.values())
    covmerge.merge(base, {"a": expert}, "average", tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in right.items():
        torch.testing.assert_close(merged[name], tensor)


def test_columns_of_zeros_change_no_solution():
    """Inputs that no expert has seen: ΣG has low rank and columns of zeros, as lstsq's gelsy fails on."""
    draw = torch.Generator().manual_seed(0)
    updates = [
        torch.randn(12, 3, generator=draw) @ torch.randn(3, 16, generator=draw) for _ in "ab"
    ]
    for update in updates:
        update[:, [0, 5]] = 0
    base = {"h.0.fc.weight": torch.zeros(12, 16)}
    experts = {name: {"h.0.fc.weight": own} for name, own in zip("ab", updates, strict=True)}
    grams = [own.double().T @ own.double() for own in updates]
    right = sum(own.double() @ gram for own, gram in zip(updates, grams, strict=True))
    right = right @ torch.linalg.pinv(sum(grams), rtol=1e-6, hermitian=True)
    merged = covmerge.merge(base, experts, "actmat").tensors["h.0.fc.weight"]
    torch.testing.assert_close(merged, right.float(), rtol=1e-3, atol=1e-3)


def test_oft_on_a_window_is_refused(tmp_path):
    """PEFT's adapter adds overlapping patches up, which no kernel does, and its merge is another model."""
    base = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False))
    config = OFTConfig(target_modules=["0"], oft_block_size=6, r=0)
    get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="convolution with a window"):
        covmerge.merge(base.state_dict(), {"a": tmp_path}, "average")
