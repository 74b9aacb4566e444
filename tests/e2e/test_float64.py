"""Checkpoints in float64, which are computed in float32 where nobody asks for more."""

import re

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import InputError, TensorError
from tests.advised import advice


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


@pytest.mark.parametrize("size", [1e-7, 1e-12])
def test_updates_that_float32_rounds_away(size):
    """They are lost in part, or all of them: then the expert seems to equal the base."""
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(16, 8, generator=draw).double()
    updates = [size * torch.randn(16, 8, generator=draw).double() for _ in "ab"]
    experts = {n: {"h.0.fc.weight": base + u} for n, u in zip("ab", updates, strict=True)}
    given = ({"h.0.fc.weight": base}, experts, "average")
    if size > 1e-8:
        result = covmerge.merge(*given)
        lost = advice(
            "weights in float64 are merged in float32, which loses {} of the update of '{}'"
        )
        assert any(re.search(lost, warning) for warning in result.warnings)
    else:
        lost = advice(
            "In float32 updates of less than 6e-8 of a weight are 0: if these are, compute in"
        )
        with pytest.raises(InputError, match=lost):
            covmerge.merge(*given)
    result = covmerge.merge(*given, dtype="float64")
    assert not result.warnings
    found = result.tensors["h.0.fc.weight"] - base
    torch.testing.assert_close(found, sum(updates) / 2, rtol=1e-3, atol=1e-3 * size)
