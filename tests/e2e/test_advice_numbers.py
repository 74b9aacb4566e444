"""What is advised where numbers are lost or do not fit: followed, and not said again."""

import json
import re

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CovmergeError
from tests.adapters.models import llama, make
from tests.advised import advice
from tests.cli.runs import covmerge as command

NAME = "fc.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def drawn(norm, seed):
    value = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    return value * (norm / value.norm())


def said_by(said, result):
    return any(re.search(said, text) for text in (*result.notes, *result.warnings))


def ace(norms, method="ace", **params):
    base = {NAME: drawn(3.0, seed=99)}
    experts = [{NAME: base[NAME] + drawn(norm, n)} for n, norm in enumerate(norms)]
    return covmerge.merge(base, experts, method, **params)


POLE = advice("where the paper's γ has a pole. --set gate=scale_free has none")
SMALLER = advice("a smaller one (--set eps={}), or ")
OTHER = advice("lost. Take {}another method (--method tsv_m)")


def test_the_pole_of_the_gate():
    assert said_by(POLE, ace([1.05, 0.95]))
    assert not said_by(POLE, ace([1.05, 0.95], gate="scale_free"))


@pytest.mark.parametrize("how", ["smaller", "method"])
def test_an_epsilon_that_outweighs_an_expert(how):
    told = ace([1e-3, 0.5])
    assert said_by(SMALLER, told) and said_by(OTHER, told)
    (eps,) = re.findall(r"\(eps=(\S+?)\)", " ".join(told.warnings))
    given = {"eps": float(eps)} if how == "smaller" else {"method": "tsv_m"}
    again = ace([1e-3, 0.5], **given)
    update, change = drawn(0.5, 1), again.tensors[NAME] - drawn(3.0, seed=99)
    assert float((change * update).sum() / update.square().sum()) > 0.5  # of the longer expert
    assert not said_by(OTHER, again)


@pytest.fixture
def lora(tmp_path):
    made = make(llama, LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "a")
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base")
    return made


def test_factors_beyond_a_dtype(lora, tmp_path):
    file = lora.folder / "adapter_model.safetensors"
    save_file({n: 1e6 * t for n, t in load_file(file).items()}, file, {"format": "pt"})
    given = (tmp_path / "base", {"a": lora.folder}, "average", tmp_path / "out")
    said = advice("the {} overflow {} ({}); store them in another dtype (--out-dtype float32)")
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(*given, form="adapter", out_dtype="float16")
    covmerge.merge(*given, form="adapter", out_dtype="float32")
    found = covmerge.merge(tmp_path / "base", {"x": tmp_path / "out"}, "average").tensors
    right = covmerge.merge(tmp_path / "base", {"a": lora.folder}, "average").tensors
    torch.testing.assert_close(found[Q], right[Q], rtol=1e-4, atol=1e6)


def test_factors_whose_squares_overflow_float32(lora, tmp_path):
    """They are finite, and so is what is stored in bfloat16: no error, and no NaN as its loss."""
    file = lora.folder / "adapter_model.safetensors"
    save_file({n: 1e18 * t for n, t in load_file(file).items()}, file, {"format": "pt"})
    given = (tmp_path / "base", {"a": lora.folder}, "average", tmp_path / "out")
    result = covmerge.merge(*given, form="adapter", out_dtype="bfloat16")
    assert 0.0 < result.stats["totals"]["rounding_loss"] < 0.01


def test_a_mergekit_recipe_in_half_precision(tmp_path):
    """Stored as before, and nearer to the merge in float32."""
    base = {NAME: drawn(3.0, 0).bfloat16()}
    experts = {n: {NAME: base[NAME] + drawn(0.05, i).bfloat16()} for i, n in enumerate("ab", 1)}
    for name, tensors in {"base": base, **experts}.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    models = [
        {"model": str(tmp_path / f"{n}.safetensors"), "parameters": {"weight": 0.4}} for n in "ab"
    ]
    given = {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base.safetensors")}
    off = {}
    right = base[NAME].double() + sum(
        0.4 * (e[NAME].double() - base[NAME].double()) for e in experts.values()
    )
    said = advice("`dtype: float32` in the mergekit recipe, and `out_dtype: {}` to store as now")
    for dtype in ("bfloat16", "float32"):
        file, out = tmp_path / f"{dtype}.yml", tmp_path / dtype
        keys = {"dtype": dtype, "out_dtype": "bfloat16", "parameters": {"normalize": False}}
        file.write_text(json.dumps(given | keys | {"models": models}))
        shown = " ".join(command("merge", file, out).stdout.split())
        assert bool(re.search(said, shown)) == (dtype == "bfloat16"), shown
        found = load_file(out / "model.safetensors")[NAME]
        assert found.dtype is torch.bfloat16
        off[dtype] = float((found.double() - right).norm())
    assert off["float32"] <= off["bfloat16"]


def test_facts_of_a_method_that_were_changed(tmp_path):
    save_file({NAME: drawn(3.0, 9)}, tmp_path / "base.safetensors")
    base = tmp_path / "base.safetensors"
    experts = {}
    for number, name in enumerate("ab"):
        experts[name] = tmp_path / f"{name}.safetensors"
        save_file({NAME: drawn(3.0, 9) + drawn(0.1, number)}, experts[name])
    out = tmp_path / "out"
    covmerge.merge(base, experts, "ace", out)
    manifest = json.loads((out / "covmerge.json").read_text())
    manifest["tensors"][NAME]["matrices"] = [{"gamma": "x"}]
    (out / "covmerge.json").write_text(json.dumps(manifest))
    said = advice("of covmerge.json is not what method '{}' writes: {}; merge again")
    with pytest.raises(CovmergeError, match=said):
        covmerge.report(out)
    covmerge.merge(base, experts, "ace", out, overwrite=True)
    covmerge.report(out)
