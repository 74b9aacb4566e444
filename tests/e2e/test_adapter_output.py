"""Adapters in, one adapter out: loaded by PEFT, it runs like the full model of the same merge."""

import copy
import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import covmerge
from covmerge.errors import InputError
from tests.cli.runs import covmerge as command
from tests.e2e.models import build, run
from tests.e2e.test_adapters import experts, family, save_adapter  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:fan_in_fan_out", "ignore:Setting `save_embedding_layers`"
)

EXACT = ["average", "task_arithmetic", "ace", "actmat", "wudi", "tsv_m", "iso_c", "iso_cts", "cart"]


def merge_adapters(folder, out, **given):
    return command(
        *("merge", "--base", folder / "base", "--as", "adapter", "--json"),
        *(f"--expert={name}={path}" for name, path in experts(folder, "adapter").items()),
        *(f"--{key}={value}" for key, value in given.items()),
        out,
    ).json


def base_of(folder):
    config = transformers.AutoConfig.from_pretrained(folder / "base")
    return getattr(transformers, config.architectures[0]).from_pretrained(folder / "base").eval()


@pytest.mark.parametrize("method", EXACT)
def test_peft_loads_it_and_it_is_the_full_merge(family, method):  # noqa: F811
    out = family / "adapter-out"
    summary = merge_adapters(family, out, method=method)
    adapted = peft.PeftModel.from_pretrained(base_of(family), out).eval()
    merged = covmerge.merge(family / "base", experts(family, "adapter"), method=method).tensors
    own = adapted.merge_and_unload()
    weights = own.state_dict()
    base = load_file(family / "base" / "model.safetensors")
    for name, expected in merged.items():
        found = weights.get(name, weights.get(f"transformer.{name}"))
        change = (expected - base[name]).norm()
        assert (found - expected).norm() <= 1e-5 * change + 1e-6, name
    assert torch.isfinite(run(own)).all()
    assert summary["totals"]["matrices"] > 0
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["r"] <= 4 + 2 + 3


def test_truncated_to_a_rank(family):  # noqa: F811
    out = family / "small"
    merge_adapters(family, out, method="task_arithmetic", rank=2)
    tensors = load_file(out / "adapter_model.safetensors")
    assert {t.shape[0] for n, t in tensors.items() if "lora_A" in n} == {2}
    manifest = json.loads((out / "covmerge.json").read_text("utf-8"))
    full = covmerge.merge(
        family / "base", experts(family, "adapter"), method="task_arithmetic", dtype="float64"
    ).tensors
    base = load_file(family / "base" / "model.safetensors")
    for name, entry in manifest["tensors"].items():
        (matrix,) = entry["matrices"]
        sigma = torch.linalg.svdvals(
            (full[name].double() - base[name]).reshape(len(base[name]), -1)
        )
        energy = sigma.square()
        lost = float(energy[2:].sum() / energy.sum())
        assert matrix["discarded_energy"] == pytest.approx(lost, abs=1e-4)
        assert matrix["singular_values"][0] == pytest.approx(float(sigma[0]), rel=1e-4)


def test_methods_that_look_at_entries_need_a_rank(family):  # noqa: F811
    sources = [f"--expert={n}={p}" for n, p in experts(family, "adapter").items()]
    arguments = ["merge", "--base", family / "base", *sources, "--as", "adapter"]
    failed = command(*arguments, "--method", "ties", "--set", "trim=tensor", family / "out", code=2)
    assert "--rank" in failed.stderr
    assert not (family / "out").exists()
    ran = command(
        *arguments, "--method", "ties", "--set", "trim=tensor", "--rank", "3", family / "out"
    )
    assert "rank 3 to 3" in ran.stdout
    peft.PeftModel.from_pretrained(base_of(family), family / "out")


def test_full_models_and_tensors_trained_whole_are_refused(family, tmp_path):  # noqa: F811
    mixed = {**experts(family, "adapter"), "e3": family / "e3" / "full"}
    sources = [f"--expert={name}={path}" for name, path in mixed.items()]
    failed = command(
        "merge", "--base", family / "base", *sources, "--as", "adapter", family / "out", code=2
    )
    assert "is a full model" in failed.stderr


def test_a_quantised_base_is_not_touched(family):  # noqa: F811
    path = family / "base" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(config))
    merge_adapters(family, family / "out", method="ace")
    with pytest.raises(InputError, match="quantised"):
        covmerge.merge(family / "base", experts(family, "adapter"), method="ace")


def test_an_embedding_adapter(tmp_path):
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    for number in (1, 2):
        save_adapter(base, tmp_path / f"e{number}", seed=number, targets=["embed_tokens", "q_proj"])
    paths = {f"e{n}": tmp_path / f"e{n}" / "adapter" for n in (1, 2)}
    sources = [f"--expert={name}={path}" for name, path in paths.items()]
    command("merge", "--base", tmp_path / "base", *sources, "--as=adapter", tmp_path / "out")
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out")
    merged = covmerge.merge(tmp_path / "base", paths).tensors
    weights = adapted.merge_and_unload().state_dict()
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(weights[name], merged[name], rtol=1e-4, atol=1e-6)
