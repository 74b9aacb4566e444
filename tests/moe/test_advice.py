"""Mixtures that are refused with an advice, and the same as it says, which are made."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.advised import advice
from tests.cli.runs import covmerge, words
from tests.e2e.following import noted, told
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
STACK = {"slices": [{"base": [0, 2], "experts": {"code": [0, 2], "math": [0, 2]}}]}
MIXTURES = {
    "shared experts": (
        RIGHT | {"shared_experts": [{"source_model": "chat"}]},
        advice("covmerge writes Mixtral, which has no shared experts: leave it out"),
        RIGHT,
    ),
    "noise": (
        RIGHT | {"experts": [FIRST | {"noise_scale": 0.1}, SECOND]},
        advice("covmerge adds no noise to weights: leave it out"),
        RIGHT,
    ),
    "a scale": (
        RIGHT | {"experts": [FIRST | {"residual_scale": 0.1}, SECOND]},
        advice("covmerge takes the experts' weights as they are: leave it out"),
        RIGHT,
    ),
    "hidden states": (
        RIGHT | {"gate_mode": "hidden"},
        advice("gate_mode is {}{}; covmerge has {}: write one of them"),
        RIGHT | {"gate_mode": "random"},
        RIGHT | {"gate_mode": "uniform_random"},
        RIGHT,
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
            "which `gates: cheap_embed` needs: put its files beside the weights, or use `gates: random`"
        ),
        RIGHT,
        RIGHT | {"gate_mode": "random", "base_model": "untold"},
    ),
}


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    base = {path.name: path for path in (models / "base").iterdir()}
    tensors = load_file(base["model.safetensors"])
    rows = {name: tensors[name][:60] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    broken = {"model.layers.0.mlp.up_proj.weight": torch.full((24, 16), torch.nan)}
    changed = {
        "broken": ({}, tensors | broken),
        "three": ({"num_hidden_layers": 3}, tensors),
        "gemma": ({"model_type": "gemma"}, tensors),
        "untold": ({}, tensors),
        "small": ({"vocab_size": 60}, tensors | rows),
    }
    for name, (config, weights) in changed.items():
        (tmp_path / name).mkdir()
        given = json.loads(base["config.json"].read_text()) | config
        (tmp_path / name / "config.json").write_text(json.dumps(given))
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        for file in [] if name == "untold" else ["tokenizer.json", "tokenizer_config.json"]:
            shutil.copy(base[file], tmp_path / name)
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
