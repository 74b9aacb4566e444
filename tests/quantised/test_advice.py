"""What errors about quantised models advise, done literally and followed to a merge that is right."""

import json
import re

import pytest
import torch
import transformers
import yaml
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import covmerge
from covmerge.errors import InputError
from covmerge.files.quantised.view import open_plain
from tests.advised import advice, rules_in
from tests.cli.runs import covmerge as command
from tests.e2e.following import told
from tests.e2e.test_advice import adapter
from tests.quantised.ggufs import save_llama, save_moe
from tests.quantised.models import FORMATS, build, llama, moved, save_packed
from tests.quantised.test_gguf import wide
from tests.quantised.test_gguf_experts import CONFIGS, moe, put
from tests.quantised.test_gguf_writing import merged as merged_gguf
from tests.quantised.test_gguf_writing import types

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    for seed, name in enumerate(("base", "a")):
        llama(seed, intermediate_size=128).save_pretrained(folder / name)
    return folder


def packed(folder, form, *, base="base"):
    """A base that is stored quantised, and an expert as well."""
    for seed, name in enumerate((base, "a")):
        save_packed(build(form, seed), folder / name, *FORMATS[form])
    return folder


def merge(folder, out, method="average", **how):
    return covmerge.merge(folder / "base", {"a": folder / "a"}, method, out, **how)


def refused(said, folder, method="average", **how):
    with pytest.raises(InputError, match=said) as error:
        merge(folder, folder / "never", method, **how)
    return str(error.value)


def check(folder, out):
    """The one expert, as far as its bits go."""
    assert covmerge.verify(out).ok
    found, right = open_plain(out), open_plain(folder / "a")
    assert found.headers.keys() == right.headers.keys()
    for name in found.headers:
        own, theirs = found.read(name).float(), right.read(name).float()
        assert float((own - theirs).norm() / theirs.norm().clamp(min=1e-9)) < 0.2, name


CHANGES = {
    "masks": (
        advice("writes masks beside plain weights: leave out `quantise`"),
        {"method": "emr"},
        {},
    ),
    "one's own": (
        advice("is not quantised: name one ({})"),
        {"quantise": "same"},
        {"quantise": "int8"},
    ),
    "MXFP4": (
        advice("clients load it of GPT-OSS alone, and this is another model; choose one of {}"),
        {"quantise": "mxfp4"},
        {"quantise": "fp8-channel"},
    ),
    "all kept": (
        advice(
            "`quantise: {}` with these `keep` leaves no tensor that is packed: keep fewer of them"
        ),
        {"quantise": "nf4", "keep": ["*"]},
        {"quantise": "nf4", "keep": ["*.up_proj.*"]},
    ),
    "no such name": (
        re.escape("`keep` has '*.dwn_proj.*', which matches no tensor: did you mean"),
        {"quantise": "nf4", "keep": ["*.dwn_proj.*"]},
        {"quantise": "nf4", "keep": ["*.down_proj.*"]},
    ),
}


@pytest.mark.parametrize(("said", "wrong", "right"), CHANGES.values(), ids=CHANGES)
def test_formats(said, wrong, right, plain, tmp_path):
    if "method" in wrong:
        with pytest.raises(InputError, match=said):
            covmerge.merge(
                plain / "base",
                {"a": plain / "a", "b": plain / "a"},
                "emr",
                tmp_path / "x",
                quantise="nf4",
            )
        covmerge.merge(
            plain / "base", {"a": plain / "a", "b": plain / "a"}, "emr", tmp_path / "out"
        )
        return
    text = refused(said, plain, **wrong)
    if "dwn" in str(wrong):
        assert "'*.down_proj.*'" in text
    elif "keep" not in wrong:
        assert right["quantise"] in text
    merge(plain, tmp_path / "out", **right)
    check(plain, tmp_path / "out")


def test_a_base_without_a_config(plain, tmp_path):
    said = advice(
        "has to be said in config.json, and {} has none: pass the folder of a whole model as base"
    )
    alone = plain / "base" / "model.safetensors"
    with pytest.raises(InputError, match=said):
        covmerge.merge(alone, {"a": plain / "a"}, "average", tmp_path / "x", quantise="int8")
    said = advice("a quantised model is written to a folder: give an output folder")
    with pytest.raises(InputError, match=said):
        covmerge.merge(plain / "base", {"a": plain / "a"}, "average", quantise="int8")
    merge(plain, tmp_path / "out", quantise="int8")
    check(plain, tmp_path / "out")


@pytest.mark.parametrize("how", ["keep", "another"])
def test_sizes_that_a_format_does_not_pack(how, tmp_path):
    for seed, name in enumerate(("base", "a")):
        llama(seed, hidden_size=128, num_hidden_layers=2).save_pretrained(tmp_path / name)
    text = refused(
        advice("and {} packs {}: {}, or choose another format"), tmp_path, quantise="gptq"
    )
    kept = yaml.safe_load(re.search(r"\(keep: (\[.*\])\)", text)[1])
    given = {"quantise": "gptq", "keep": kept} if how == "keep" else {"quantise": "fp8-channel"}
    merge(tmp_path, tmp_path / "out", **given)
    check(tmp_path, tmp_path / "out")


def test_scales_of_activations(tmp_path):
    packed(tmp_path, "compressed-tensors")
    said = advice("no merged model's: name a format without them, such as fp8-channel")
    refused(said, tmp_path, quantise="same")
    merge(tmp_path, tmp_path / "out", quantise="fp8-channel")
    check(tmp_path, tmp_path / "out")


def test_a_quantised_base_in_slices(tmp_path):
    packed(tmp_path, "fp8 by block")
    names = [{"model": str(tmp_path / n), "layer_range": [0, 1]} for n in ("base", "a")]
    given = {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base")}
    given |= {"slices": [{"sources": names}], "parameters": {"weight": 1.0}}
    file = tmp_path / "recipe.yml"
    file.write_text(json.dumps(given))
    quantise = "--quantise=fp8-channel"
    said = advice(
        "through `slices` or a `tokenizer`: merge without `quantise`, and quantise the output by a"
    )
    told(said, "merge", file, tmp_path / "x", quantise)
    command("merge", file, tmp_path / "first")
    one = {"base": None, "experts": {"first": "./first"}, "method": "passthrough"}
    file.write_text(json.dumps(one))
    command("merge", file, tmp_path / "out", quantise)
    check(tmp_path, tmp_path / "out")


def test_a_format_that_is_not_read_is_dequantised_by_transformers(tmp_path):
    packed(tmp_path, "fp8 by block")
    for name in ("base", "a"):
        config = tmp_path / name / "config.json"
        told = json.loads(config.read_text())
        told["dtype"] = "float64"
        config.write_text(json.dumps(told))
    said = advice("dequantise it first (transformers: {}), or pass the model as it was before")
    assert "FineGrainedFP8Config(dequantize=True)" in refused(said, tmp_path)
    for name in ("base", "a"):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / name,
            dtype=torch.float32,
            quantization_config=FineGrainedFP8Config(dequantize=True),
        )
        model.save_pretrained(tmp_path / "new" / name, save_original_format=False)
    merge(tmp_path / "new", tmp_path / "out")
    check(tmp_path / "new", tmp_path / "out")


def test_another_format_is_passed_as_it_was_before(plain, tmp_path):
    packed(tmp_path, "gptq")
    config = tmp_path / "a" / "config.json"
    config.write_text(config.read_text().replace('"gptq"', '"hqq"'))
    refused(advice("pass the model as it was before it was quantised"), tmp_path)
    merge(plain, tmp_path / "out")
    check(plain, tmp_path / "out")


@pytest.mark.parametrize("form", ["gptq", "fp8 by block"])
def test_a_format_that_the_config_lacks_is_stated(form, tmp_path):
    packed(tmp_path, form)
    kept = {}
    for name in ("base", "a"):
        config = tmp_path / name / "config.json"
        kept[config] = json.loads(config.read_text())
        config.write_text(json.dumps({**kept[config], "quantization_config": {}}))
    said = advice(
        "state its {} at the top of a config.json beside it, and pass the folder. Else {}"
    )
    refused(said, tmp_path)
    for config, whole in kept.items():
        config.write_text(json.dumps(whole))
    merge(tmp_path, tmp_path / "out")
    check(tmp_path, tmp_path / "out")


def test_a_plain_model_that_says_it_is_quantised(plain, tmp_path):
    for name in ("base", "a"):
        moved(llama(0, intermediate_size=128), 1 + len(name)).save_pretrained(tmp_path / name)
    config = tmp_path / "a" / "config.json"
    was = config.read_text()
    config.write_text(json.dumps({**json.loads(was), "quantization_config": FORMATS["gptq"][1]}))
    refused(advice("if it is plain, remove that from config.json"), tmp_path)
    config.write_text(was)
    merge(tmp_path, tmp_path / "out")
    check(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("how", ["rule", "method", "plain"])
def test_an_adapter_over_a_quantised_base(how, tmp_path):
    """A method that looks at the base's weights, and a base in a format that is not read."""
    packed(tmp_path, "bitsandbytes")
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"bitsandbytes"', '"hqq"'))
    build("bitsandbytes", 0).save_pretrained(tmp_path / "plain" / "base")
    experts = {}
    for seed, name in enumerate("xy"):
        config = LoraConfig(r=2, target_modules=["up_proj", "lm_head"], init_lora_weights=False)
        torch.manual_seed(seed)
        adapted = adapter(build("bitsandbytes", 0), config)
        adapted.save_pretrained(tmp_path / name, save_embedding_layers=False)
        experts[name] = tmp_path / name
    given = {"form": "adapter", "rank": 4}
    out = tmp_path / "out"
    said = advice("works on the updates alone, or pass the base as it was before it was quantised")
    with pytest.raises(InputError, match=said) as told:
        covmerge.merge(tmp_path / "base", experts, "model_stock", tmp_path / "never", **given)
    base, method, rules = tmp_path / "base", "model_stock", []
    if how == "rule":
        rules = rules_in(str(told.value))
    elif how == "method":
        method = "average"
    else:
        base = tmp_path / "plain" / "base"
    covmerge.merge(base, experts, method, out, rules=rules, **given)
    assert covmerge.verify(out).ok
    names = set(load_file(out / "adapter_model.safetensors"))
    assert any("up_proj" in name for name in names) == (how != "rule")


# GGUF.


def test_a_base_that_is_no_gguf_file(plain, tmp_path):
    said = advice("is none: pass one as base, or merge without `quantise` and convert the output")
    refused(said, plain, quantise="gguf")
    save_llama(llama(0, intermediate_size=128), tmp_path / "base.gguf", "F16")
    covmerge.merge(
        tmp_path / "base.gguf", {"a": plain / "a"}, "average", tmp_path / "out", quantise="gguf"
    )
    check(plain, tmp_path / "out")


def test_shards_of_a_gguf_file(tmp_path):
    with pytest.raises(
        InputError, match=advice("writes one GGUF file: leave out `shard_size`, and")
    ):
        merged_gguf(tmp_path, llama, save_llama, "Q8_0", "same", shard_size=10**6)
    merged_gguf(tmp_path, llama, save_llama, "Q8_0", "same")


@pytest.mark.parametrize("wanted", ["gguf", "gguf-q8_0", "gguf-f16"])
def test_types_that_gguf_does_not_make(wanted, tmp_path):
    with pytest.raises(InputError) as told:
        merged_gguf(tmp_path, wide, save_llama, "Q4_K", "same")
    for said in (
        advice("`quantise: gguf` writes the next higher type ({})"),
        advice(
            "; `gguf-q8_0` writes one type; or write gguf-f16, and quantise it by llama-quantize"
        ),
    ):
        assert re.search(said, str(told.value))
    merged_gguf(tmp_path, wide, save_llama, "Q4_K", wanted)
    written = {"gguf": "Q5_0"}.get(wanted, wanted.partition("-")[2].upper())
    assert written in types(tmp_path / "out" / "model.gguf").values()


@pytest.mark.parametrize("how", ["keep", "another"])
def test_rows_of_no_whole_blocks(how, tmp_path):
    def narrow(seed):
        return llama(seed, hidden_size=48, intermediate_size=96, num_hidden_layers=2)

    said = advice("packs rows of whole blocks of 32: {}, or choose another type")
    with pytest.raises(InputError, match=said) as told:
        merged_gguf(tmp_path, narrow, save_llama, "F16", "gguf-q8_0")
    kept = yaml.safe_load(re.search(r"\(keep: (\[.*\])\)", str(told.value))[1])
    given = {"wanted": "gguf-q8_0", "keep": kept} if how == "keep" else {"wanted": "gguf-bf16"}
    merged_gguf(tmp_path, narrow, save_llama, "F16", **given)
    assert covmerge.verify(tmp_path / "out").ok


@pytest.mark.parametrize("how", ["remove", "correct"])
def test_a_config_beside_a_gguf_file(how, tmp_path):
    save_moe(moe("qwen3_moe", 1), tmp_path / "model.gguf", "Q8_0")
    config = CONFIGS["qwen3_moe"]()
    config.update({"num_experts": 4})
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=advice("remove or correct the config.json beside it")):
        open_plain(tmp_path)
    if how == "remove":
        (tmp_path / "config.json").unlink()
    else:
        CONFIGS["qwen3_moe"]().save_pretrained(tmp_path)
    assert open_plain(tmp_path).headers


def test_experts_at_once_of_a_gguf_file(tmp_path):
    path = save_moe(moe("qwen3_moe", 1), tmp_path / "model.gguf", "Q8_0")
    data = path.read_bytes()
    key = b"qwen3moe.expert_used_count"
    path.write_bytes(put(data, data.index(key) + len(key) + 4, "<I", 7))
    with pytest.raises(InputError, match=advice("convert the model again")):
        open_plain(path)
    assert open_plain(save_moe(moe("qwen3_moe", 1), path, "Q8_0")).headers


@pytest.mark.parametrize("kept", [["*.experts.*"], []])
def test_a_part_of_the_experts_is_kept(kept, tmp_path):
    def built(seed):
        return moe("qwen3_moe", seed)

    with pytest.raises(InputError) as told:
        merged_gguf(tmp_path, built, save_moe, "F16", "gguf-q8_0", keep=["*.experts.0.*"])
    said = advice("one type for all experts of a layer ('{}'): keep all of them or none")
    assert re.search(said, str(told.value))
    merged_gguf(tmp_path, built, save_moe, "F16", "gguf-q8_0", keep=kept)
    assert covmerge.verify(tmp_path / "out").ok


def test_a_part_of_the_experts_is_kept_plain(tmp_path):
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
        )
    )
    model.save_pretrained(tmp_path / "base")
    moved(model, 1).save_pretrained(tmp_path / "a")
    said = advice("which are one module once they are loaded: keep both or none")
    refused(said, tmp_path, quantise="fp8-block", keep=["*.experts.0.*"])
    for number, keep in enumerate((["*.experts.*"], [])):
        merge(tmp_path, tmp_path / f"out{number}", quantise="fp8-block", keep=keep)
        check(tmp_path, tmp_path / f"out{number}")


def test_a_folder_of_several_gguf_files(tmp_path):
    """As repositories have them, one a type."""
    files = [save_llama(llama(0), tmp_path / f"model-{k}.gguf", k) for k in ("F16", "Q8_0")]
    said = advice(
        "holds {}, and no name tells which of them is the model: pass the one to merge, or a folder that"
    )
    with pytest.raises(InputError, match=said):
        open_plain(tmp_path)
    assert open_plain(files[0]).headers
    files[1].unlink()
    assert open_plain(tmp_path).headers
