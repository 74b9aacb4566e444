import torch
from safetensors.torch import load_file
from torch import nn

from tests.cli.runs import covmerge


def test_a_pickled_module_becomes_safetensors(tmp_path):
    torch.save(nn.Linear(2, 3), tmp_path / "m.pt")
    out = tmp_path / "m.safetensors"
    ran = covmerge("convert", tmp_path / "m.pt", out)
    assert "2 tensors" in ran.stdout
    assert set(load_file(out)) == {"weight", "bias"}
    assert "--overwrite" in covmerge("convert", tmp_path / "m.pt", out, code=2).stderr
    covmerge("convert", tmp_path / "m.pt", out, "--overwrite")
    missing = covmerge("convert", tmp_path / "none.pt", tmp_path / "n.safetensors", code=2)
    assert "none.pt" in missing.stderr
    assert not list(tmp_path.glob(".*"))
