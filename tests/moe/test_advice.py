"""Mixtures that are refused with an advice, and the same as it says, which are made."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.advised import advice
from tests.cli.runs import covmerge, words
from tests.e2e.following import noted, told
from tests.folders import contents
from tests.moe.test_architectures import DENSE, NAMES, experts_of
from tests.moe.test_mixture import models  # pyright: ignore[reportUnusedImport]

__all__ = ["models"]  # a fixture


def prompts(*said, negative=()):
    """Experts with these prompts, and the first with negative ones."""
    names = ["code", "math", "chat"][: len(said)]
    experts = [
        {"source_model": name, "positive_prompts": own}
        for name, own in zip(names, said, strict=True)
    ]
    experts[0]["negative_prompts"] = list(negative)
    return {"experts": experts}


RIGHT = {"base_model": "base", "gate_mode": "cheap_embed"} | prompts(["w1"], ["w5"])
FIRST, SECOND = RIGHT["experts"]
OURS = {
    "base": "base",
    "experts": {"code": "code", "math": "math"},
    "moe": {"gates": "random"},
    "rules": [{"match": "*", "use": "base"}],
}
READING = OURS | {"moe": {"gates": "update"}}
THIRD = {"source_model": "chat", "positive_prompts": ["w9"]}
QWEN = RIGHT | {"architecture": "qwen", "shared_experts": [THIRD]}
THREE = OURS | {"experts": OURS["experts"] | {"chat": "chat"}}
GIVEN = {"gates": "random", "architecture": "qwen2_moe", "shared": {"expert": "chat"}}
OLMO, YOUTU = ({name: f"{kind}/{name}" for name in NAMES} for kind in ("olmo2", "youtu"))
STACK = {"slices": [{"base": [0, 2], "experts": {"code": [0, 2], "math": [0, 2]}}]}
MIXTURES = {
    "two shared experts": (
        QWEN | {"shared_experts": [THIRD, THIRD]},
        advice("covmerge shares one expert: leave the others out"),
        QWEN,
    ),
    "a shared expert whose gate nobody tells": (
        RIGHT | {"architecture": "qwen", "shared_experts": [{"source_model": "chat"}]},
        advice(
            "the shared expert has a gate, by its positive_prompts or at random, with `architecture: "
            "qwen`, and none with `architecture: deepseek`; this is {}: change one of them"
        ),
        QWEN,
        RIGHT | {"architecture": "deepseek", "shared_experts": [{"source_model": "chat"}]},
    ),
    "no shared expert": (
        RIGHT | {"architecture": "qwen moe"},
        advice("qwen needs a shared expert: add one under shared_experts"),
        QWEN,
    ),
    "their architecture": (
        RIGHT | {"architecture": "gpt"},
        advice(
            "architecture is {}; mergekit-moe has mixtral, deepseek, qwen and qwen3: write one of them"
        ),
        RIGHT | {"architecture": "mixtral"},
        RIGHT | {"architecture": "deepseek"},
    ),
    "noise": (
        RIGHT | {"experts": [FIRST | {"noise_scale": 0.1}, SECOND]},
        advice("covmerge adds no noise to weights: leave it out"),
        RIGHT,
    ),
    "their gates": (
        RIGHT | {"gate_mode": "deep"},
        advice("gate_mode is {}; covmerge has {}: write one of them"),
        RIGHT | {"gate_mode": "random"},
        RIGHT | {"gate_mode": "uniform_random"},
        RIGHT | {"gate_mode": "hidden"},
        RIGHT | {"gate_mode": "hidden_avg"},
        RIGHT | {"gate_mode": "hidden_last"},
        RIGHT,
    ),
    "prompts without end": (
        RIGHT | {"gate_mode": "hidden"} | prompts(["w1 " * 30_000, "w2", "w3"], ["w5"]),
        advice(
            "{} prompts of up to {} tokens are too much to run at once: write shorter or fewer ones, or "
            "use `gates: cheap_embed`"
        ),
        RIGHT | {"gate_mode": "hidden"},
        RIGHT,
    ),
    "OLMoE": (
        OURS | {"moe": {"gates": "random", "architecture": "olmoe"}},
        advice(
            "it norms q and k over all heads, and what attention and MLP read, as no dense model does: "
            "write flex_olmo, with an OLMo 2 base"
        ),
        OURS
        | {
            "base": "olmo2/base",
            "experts": OLMO,
            "moe": {"gates": "random", "architecture": "flex_olmo"},
        },
    ),
    "DeepSeek-V2": (
        OURS | {"moe": {"gates": "random", "architecture": "deepseek_v2"}},
        advice(
            "in transformers the weights of a token's experts do not add up to 1 there: write deepseek_v3, "
            "with a Youtu base"
        ),
        OURS
        | {
            "base": "youtu/base",
            "experts": YOUTU,
            "moe": {"gates": "random", "architecture": "deepseek_v3"},
        },
    ),
    "DeepSeek-MoE": (
        OURS | {"moe": {"gates": "random", "architecture": "deepseek"}},
        advice(
            "transformers has it in no release: write qwen2_moe, with a Llama base and a shared expert, or "
            "mixtral without one"
        ),
        OURS | {"moe": {"gates": "random", "architecture": "qwen2_moe"}},
        OURS,
    ),
    "a shared expert in Mixtral": (
        THREE | {"moe": {"gates": "random", "shared": {"expert": "chat"}}},
        advice("{} has no shared expert: leave out moe.shared, or write `architecture: {}`"),
        THREE | {"moe": {"gates": "random"}},
        THREE | {"moe": GIVEN},
    ),
    "prompts of a shared expert": (
        THREE | {"moe": GIVEN | {"prompts": {"chat": {"positive": ["w1"]}}}},
        advice(
            "moe.prompts has prompts of '{}', which is shared without a gate: leave them out, or write "
            "`gated: true`"
        ),
        THREE | {"moe": GIVEN},
        THREE
        | {
            "moe": GIVEN
            | {
                "prompts": {"chat": {"positive": ["w1"]}},
                "shared": {"expert": "chat", "gated": True},
            }
        },
    ),
    "a gate that updates do not make": (
        THREE | {"moe": GIVEN | {"gates": "update", "shared": {"expert": "chat", "gated": True}}},
        advice(
            "gates: update compares experts, and a shared one has none to be compared with: leave "
            "out `gated`"
        ),
        THREE | {"moe": GIVEN | {"gates": "update"}},
    ),
    "a gate that DeepSeek has not": (
        OURS
        | {
            "base": "youtu/base",
            "experts": YOUTU,
            "moe": GIVEN
            | {"architecture": "deepseek_v3", "shared": {"expert": "chat", "gated": True}},
        },
        advice("the shared expert of {} has no gate: leave out `gated`"),
        OURS
        | {
            "base": "youtu/base",
            "experts": YOUTU,
            "moe": GIVEN | {"architecture": "deepseek_v3"},
        },
    ),
    "an expert twice": (
        RIGHT | {"experts": [FIRST, SECOND, SECOND]},
        advice(
            "two experts are the same model, so a gate between them does nothing: leave one out"
        ),
        RIGHT,
    ),
    "no prompts": (
        RIGHT | {"experts": [FIRST, {"source_model": "math"}]},
        advice("add them under moe.prompts (mergekit-moe: positive_prompts), or use gates: random"),
        RIGHT,
        OURS
        | {
            "moe": {
                "gates": "cheap_embed",
                "prompts": {n: {"positive": [w]} for n, w in [("code", "w1"), ("math", "w5")]},
            }
        },
        OURS,
    ),
    "prompts that cancel": (
        RIGHT | prompts(["w1"], ["w5"], negative=["w1"]),
        advice("write positive prompts of other tokens than the negative ones"),
        RIGHT | prompts(["w1"], ["w5"], negative=["w2"]),
    ),
    "a token that the base has not": (
        RIGHT | prompts(["w60"], ["w5"]) | {"base_model": "small"},
        advice("and the base has {} embeddings: change the prompt, or correct the tokenizer"),
        RIGHT | {"base_model": "small"},
    ),
    "slices": (
        OURS | STACK,
        advice("'moe' and '{}' do not go together: merge by '{}' first"),
        OURS,
    ),
    "layers without an MLP": (
        RIGHT | {"base_model": "three"},
        advice("config.json says {} layers, and {} of them have an MLP: correct config.json"),
        RIGHT,
    ),
    "another architecture": (
        RIGHT | {"base_model": "gemma"},
        advice("{}: choose a base of one of them"),
        RIGHT,
    ),
    "no numbers": (
        READING | {"experts": OURS["experts"] | {"broken": "broken"}},
        advice("or of the base, holds NaN or Inf: leave the expert out, or save it anew"),
        READING,
        READING | {"experts": OURS["experts"] | {"chat": "chat"}},
    ),
    "no tokenizer": (
        RIGHT | {"base_model": "untold"},
        advice(
            "which gates of prompts need: put its files beside the weights, or use `gates: random`"
        ),
        RIGHT,
        RIGHT | {"gate_mode": "random", "base_model": "untold"},
    ),
}


@pytest.fixture(scope="module")
def made(models, tmp_path_factory):
    """A folder of all that recipes here name."""
    folder = tmp_path_factory.mktemp("made")
    for path in models.iterdir():
        (folder / path.name).symlink_to(path)
    base = {path.name: path for path in (models / "base").iterdir()}
    tensors = load_file(base["model.safetensors"])
    rows = {name: tensors[name][:60] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    broken = {"model.layers.0.mlp.up_proj.weight": torch.full((24, 16), torch.nan)}
    for kind, architecture in (("olmo2", "flex_olmo"), ("youtu", "deepseek_v3")):
        experts_of(kind, folder / kind, **DENSE[architecture, kind])
    changed = {
        "broken": ({}, tensors | broken),
        "three": ({"num_hidden_layers": 3}, tensors),
        "gemma": ({"model_type": "gemma"}, tensors),
        "untold": ({}, tensors),
        "small": ({"vocab_size": 60}, tensors | rows),
    }
    for name, (config, weights) in changed.items():
        (folder / name).mkdir()
        given = json.loads(base["config.json"].read_text()) | config
        (folder / name / "config.json").write_text(json.dumps(given))
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
        for file in [] if name == "untold" else ["tokenizer.json", "tokenizer_config.json"]:
            shutil.copy(base[file], folder / name)
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


MADE = []  # recipes that were carried out, each once


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_as_it_is_advised(name, here):
    wrong, said, *right = MIXTURES[name]
    file = here / "recipe.yml"
    file.write_text(json.dumps(wrong))
    told(said, "merge", file, "out")
    for number, recipe in enumerate(one for one in right if one not in MADE):
        MADE.append(recipe)
        file.write_text(json.dumps(recipe))
        covmerge("merge", file, f"out{number}")
        covmerge("verify", f"out{number}")


def test_updates_that_are_told_apart(here):
    """Two experts that read one direction, and what may be done: without one of them, or by prompts."""
    tensors = load_file(here / "base" / "model.safetensors")
    (here / "alike").mkdir()
    shutil.copy(here / "base" / "config.json", here / "alike")
    own = load_file(here / "code" / "model.safetensors")
    again = {name: own[name] + (own[name] - tensors[name]) / 4 for name in own}
    save_file(again, here / "alike" / "model.safetensors", metadata={"format": "pt"})
    three = OURS["experts"] | {"alike": "alike"}
    said = advice(
        "leave one of two that learned alike out, or use `gates: cheap_embed` with prompts"
    )
    by_prompts = {
        "gates": "cheap_embed",
        "prompts": {n: {"positive": [f"w{5 * k}"]} for k, n in enumerate(three)},
    }
    ways = (READING | {"experts": three}, READING, OURS | {"experts": three, "moe": by_prompts})
    for number, recipe in enumerate(ways):
        (here / "recipe.yml").write_text(json.dumps(recipe))
        ran = covmerge("merge", here / "recipe.yml", f"out{number}")
        text = words(ran.stdout + ran.stderr)
        if number == 0:
            noted(said, text)
        else:
            assert "nearly dependent" not in text, (number, text)


def test_prompts_that_are_told_apart(here):
    """By other words, or by taking off what all have in common."""
    same = ["w1 w2 w3 w4 w5 w6 w7 w8 " * 8]
    own = ([f"{same[0]} w20"], [f"{same[0]} w21"])
    said = advice(
        "write prompts that differ more, or add what the experts share as negative prompts"
    )
    shared = prompts(*own)["experts"]
    ways = (
        prompts(["w1"], ["w5"]),
        {"experts": [one | {"negative_prompts": same} for one in shared]},
    )
    file = here / "recipe.yml"
    for number, experts in enumerate((prompts(*own), *ways)):
        file.write_text(json.dumps(RIGHT | experts))
        ran = covmerge("merge", file, f"out{number}")
        text = words(ran.stdout + ran.stderr)
        if number == 0:
            noted(said, text)
        else:
            assert "nearly dependent" not in text, (number, text)


def test_prompts_that_no_gate_reads_are_told(here):
    said = advice("`gates: {}` reads no prompts: those of the recipe have no part in it")
    asked = {"gates": "random", "prompts": {"code": {"positive": ["w1"]}}}
    for moe, noted_once in ((asked, True), ({"gates": "random"}, False)):
        (here / "recipe.yml").write_text(json.dumps(OURS | {"moe": moe}))
        ran = covmerge("merge", here / "recipe.yml", f"out-{noted_once}")
        assert bool(re.search(said, words(ran.stdout))) == noted_once
    assert (
        contents(here / "out-True")["model.safetensors"]
        == (contents(here / "out-False")["model.safetensors"])
    )
