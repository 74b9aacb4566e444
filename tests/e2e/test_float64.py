"""Checkpoints in float64, which are computed in float32 where nobody asks for more."""

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import TensorError


def test_weights_that_float32_takes_for_zero(tmp_path):
    generator = torch.Generator().manual_seed(0)
    name, draw = "layers.0.proj.weight", lambda: torch.randn(6, 8, generator=generator).double()
    scale = {"scale": torch.tensor(4.6, dtype=torch.float64)}  # one that nobody changed
    weight = 1e-150 * draw()
    save_file({name: weight, **scale}, tmp_path / "base.safetensors")
    save_file({name: weight + 1e-152 * draw(), **scale}, tmp_path / "a.safetensors")
    merge = (tmp_path / "base.safetensors", {"a": tmp_path / "a.safetensors"}, "average")
    match = r"'layers\.0\.proj\.weight': the weights of expert 'a' are .* compute in float64"
    with pytest.raises(TensorError, match=match):
        covmerge.merge(*merge, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    covmerge.merge(*merge, out=tmp_path / "out", dtype="float64")


def test_what_float32_cuts_off_is_said(tmp_path):
    base = {"layers.0.proj.weight": torch.ones(4, 4, dtype=torch.float64)}
    own = {"layers.0.proj.weight": torch.full((4, 4), 1.5, dtype=torch.float64)}
    result = covmerge.merge(base, {"a": own}, "average")
    assert any("stored in float64 and computed in float32" in note for note in result.notes)
    result = covmerge.merge(base, {"a": own}, "average", dtype="float64")
    assert not any("float64" in note for note in result.notes)
