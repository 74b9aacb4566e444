"""The weight of an expert that is alone is the share of its update, by every route and every method."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import RecipeError
from covmerge.run.recompute import recompute
from tests.cli.runs import covmerge as run

BASE = {"h.0.proj.weight": torch.randn(24, 16), "h.0.proj.bias": torch.randn(24)}
UPDATE = {name: 0.05 * torch.randn(value.shape) for name, value in BASE.items()}
EXPERT = {name: value + UPDATE[name] for name, value in BASE.items()}


def share(found, of=UPDATE):
    """s of found = base + s · update, where all tensors have the same."""
    shares = []
    for name, update in of.items():
        moved = found[name].double() - BASE[name].double()
        shares.append(float((moved * update).sum() / update.double().square().sum()))
        assert torch.allclose(moved, shares[-1] * update.double(), atol=1e-5)
    assert max(shares) - min(shares) < 1e-4
    return shares[0]


@pytest.fixture
def files(tmp_path):
    for name, tensors in (("base", BASE), ("a", EXPERT)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize("method", ["average", "auto", "actmat", "linear", "task_arithmetic"])
def test_half_of_an_update(method):
    parameters = {"scale": 1.0} if method == "task_arithmetic" else {}
    merged = covmerge.merge(BASE, {"a": EXPERT}, method, weights=[0.5], **parameters).tensors
    assert share(merged) == pytest.approx(0.5, abs=1e-4)


def test_statistics_go_no_further_than_the_experts(tmp_path):
    """Three times the way from a variance of 1 to 0.2 is -1.4, of which the model computes NaN."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).eval()
    expert = {n: w + 0.01 if w.is_floating_point() else w for n, w in base.state_dict().items()}
    expert["1.running_var"] = torch.full((8,), 0.2)
    for weight, share in ((3.0, 1.0), (0.5, 0.5)):
        out = tmp_path / f"{weight}"
        result = covmerge.merge(base, {"a": expert}, weights=[weight], out=out)
        found = load_file(out / "model.safetensors")
        variance = 1.0 + share * (expert["1.running_var"] - 1.0)
        torch.testing.assert_close(found["1.running_var"], variance)
        moved = base.state_dict()["0.weight"] + 0.01 * weight
        torch.testing.assert_close(found["0.weight"], moved)
        assert result.verification.ok


ALONE = [
    name
    for name in covmerge.methods.names()
    if (known := covmerge.methods.get(name)).takes(1) and known.data == "none"
]


@pytest.mark.parametrize("method", ALONE)
def test_every_method_gives_the_share_of_what_it_merges(method):
    known = covmerge.methods.get(method)
    base = BASE["h.0.proj.weight"] if known.needs_base or known.sees == "weights" else None
    update = UPDATE["h.0.proj.weight"]
    whole = covmerge.merge_layer([update], method, base=base)
    half = covmerge.merge_layer([update], method, weights=[0.5], base=base)
    assert torch.allclose(half, whole / 2, atol=1e-6)


def test_by_the_command_line_and_by_a_recipe(files):
    out, again = files / "out", files / "again"
    sources = [f"--base={files}/base.safetensors", f"--expert=a={files}/a.safetensors"]
    assert run("merge", *sources, "--weight=a=0.5", out).code == 0
    assert share(load_file(out / "model.safetensors")) == pytest.approx(0.5, abs=1e-4)
    assert recompute(out).ok
    experts = "{a: {source: a.safetensors, weight: {by_name: [{match: '*', value: 0.25}]}}}"
    (files / "recipe.yml").write_text(f"base: base.safetensors\nexperts: {experts}\n")
    assert run("merge", files / "recipe.yml", again).code == 0
    assert share(load_file(again / "model.safetensors")) == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("form", ["model", "adapter"])
def test_of_an_adapter(tmp_path, form):
    left, right = torch.randn(24, 2), 0.05 * torch.randn(2, 16)
    folder = tmp_path / "adapter"
    folder.mkdir()
    weights = {"h.0.proj.lora_A.weight": right, "h.0.proj.lora_B.weight": left}
    named = {f"base_model.model.{name}": value for name, value in weights.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["proj"]}'
    (folder / "adapter_config.json").write_text(config)
    save_file(BASE, tmp_path / "base.safetensors")
    out = tmp_path / "out"
    sources = [f"--base={tmp_path}/base.safetensors", f"--expert=a={folder}", "--weight=a=0.5"]
    assert run("merge", *sources, f"--as={form}", out).code == 0
    if form == "model":
        merged = load_file(out / "model.safetensors")["h.0.proj.weight"] - BASE["h.0.proj.weight"]
    else:
        found = load_file(out / "adapter_model.safetensors")
        b, a = (found[f"base_model.model.h.0.proj.lora_{x}.weight"] for x in "BA")
        scale = json.loads((out / "adapter_config.json").read_text())
        merged = scale["lora_alpha"] / scale["r"] * b @ a
    assert torch.allclose(merged, left @ right / 2, atol=1e-5)


def test_what_is_no_share_of_an_update_is_refused(files):
    half = {"a": 0.5}
    text = "base: null\nmethod: linear\nexperts: {a: {source: a.safetensors, weight: 0.5}}\n"
    (files / "recipe.yml").write_text(text)
    said = run("merge", files / "recipe.yml", files / "out", code=2).stderr
    assert (
        "the weight 0.5 of 'a', which is alone, is the share of its update, and there is no" in said
    )
    with pytest.raises(RecipeError, match="'emr' writes what gives the expert back"):
        covmerge.merge(BASE, {"a": EXPERT}, "emr", weights=half)
    with pytest.raises(RecipeError, match="must be greater than 0"):
        covmerge.merge(BASE, {"a": EXPERT}, "average", weights={"a": -0.5})
    merged = covmerge.merge(BASE, {"a": EXPERT}, "task_arithmetic", scale=-0.5).tensors
    assert float(merged["h.0.proj.weight"].sub(BASE["h.0.proj.weight"]).norm()) > 0
