"""What errors advise about adapters as outputs, and about slices: followed to a right output."""

import re

import pytest
import torch
import yaml
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CLIPTextConfig, CLIPTextModel

import covmerge
from tests.adapters.models import llama, make, mixtral
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.e2e.following import merged, recipe, told

TABLE = "embeddings.token_embedding.weight"


def clip():
    """A part of a pipeline, whose layers have names in Kohya's form."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(**sizes, num_hidden_layers=2, vocab_size=30))


def adapted(folder, build=llama, **config):
    """A base, an adapter of it, and PEFT's merge of both."""
    made = make(build, LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | config), folder / "a")
    torch.manual_seed(0)
    build().save_pretrained(folder / "base")
    return made.merged


def flags(folder, *more):
    return ["--base", folder / "base", "--expert", f"a={folder / 'a'}", *more]


def same(found, right):
    assert found.keys() <= right.keys()  # which has buffers too that are not stored
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-5, atol=1e-6)


def folded(folder):
    """A base with its merged adapter, as covmerge has them together."""
    return covmerge.merge(folder / "base", {"x": folder / "out"}, "average").tensors


@pytest.mark.parametrize("how", ["peft", "rule"])
def test_what_kohyas_form_cannot_hold_whole(how, tmp_path):
    right = adapted(tmp_path, clip, modules_to_save=["final_layer_norm"])
    said = advice(
        "is held whole, which a file of {}'s form has no place for: write PEFT's (--as peft), or leave it"
    )
    told(said, "merge", *flags(tmp_path, "--as=kohya"), tmp_path / "out")
    if how == "peft":
        command("merge", *flags(tmp_path, "--as=peft"), tmp_path / "out")
    else:
        rules = [{"match": "*final_layer_norm*", "use": "base"}]
        output = {"format": "adapter", "names": "kohya"}
        command("merge", recipe(tmp_path, rules=rules, output=output), tmp_path / "out")
        base = load_file(tmp_path / "base" / "model.safetensors")
        right |= {name: tensor for name, tensor in base.items() if "final_layer_norm" in name}
    same(folded(tmp_path), right)


@pytest.mark.parametrize("how", ["peft", "rule"])
def test_an_embedding_in_kohyas_form(how, tmp_path):
    right = adapted(tmp_path, clip, target_modules=["q_proj", "token_embedding"])
    said = advice(
        "has linear layers and convolutions alone: write PEFT's (--as peft), or leave it to the base by a"
    )
    told(said, "merge", *flags(tmp_path, "--as=kohya"), tmp_path / "out")
    if how == "peft":
        command("merge", *flags(tmp_path, "--as=peft"), tmp_path / "out")
    else:
        rules = [{"match": TABLE, "use": "base"}]
        output = {"format": "adapter", "names": "kohya"}
        command("merge", recipe(tmp_path, rules=rules, output=output), tmp_path / "out")
        right |= {TABLE: load_file(tmp_path / "base/model.safetensors")[TABLE]}
    same(folded(tmp_path), right)


@pytest.mark.parametrize("how", ["peft"])
def test_which_part_of_a_pipeline_a_base_is(how, tmp_path):
    right = adapted(tmp_path)
    said = advice("expert's file does: a file of {}'s form needs that. Write PEFT's (--as peft)")
    told(said, "merge", *flags(tmp_path, "--as=kohya"), tmp_path / "out")
    command("merge", *flags(tmp_path, f"--as={how}"), tmp_path / "out")
    same(folded(tmp_path), right)


@pytest.mark.parametrize("how", ["model", "rule"])
def test_factors_of_a_stack(how, tmp_path):
    parameters = ["mlp.experts.down_proj"]
    right = adapted(tmp_path, mixtral, target_modules=["q_proj"], target_parameters=parameters)
    said = advice(
        ", which a merged adapter does not hold: merge to a full model (--as model), or add "
    )
    given = told(f"{said}.*", "merge", *flags(tmp_path, "--as=adapter"), "x")
    if how == "model":
        merged(*flags(tmp_path, "--as=model"), out=tmp_path / "out")
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        same(found, right)
    else:
        rules = [yaml.safe_load(re.search(r"\{.*\}", given[0])[0])]
        rules[0]["match"] = rules[0]["match"].replace("layers.0", "layers.*")
        file = recipe(tmp_path, rules=rules, output={"format": "adapter"})
        command("merge", file, tmp_path / "out")
        found = folded(tmp_path)
        same({name: t for name, t in found.items() if "q_proj" in name}, right)


def test_masks_in_an_adapter(tmp_path):
    adapted(tmp_path)
    make(llama, LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "b")
    both = [*flags(tmp_path), "--expert", f"b={tmp_path / 'b'}", "--method=emr", "--rank=4"]
    said = advice("an adapter has no place for: merge to a full model (--as model)")
    told(said, "merge", *both, "--as=adapter", tmp_path / "out")
    merged(*both[:-1], "--as=model", out=tmp_path / "out")
