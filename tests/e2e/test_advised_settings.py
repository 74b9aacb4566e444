"""Each setting that an error advises is taken from its text, applied, and gives the right tensors."""

import json
import re
from dataclasses import dataclass, field

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from covmerge import merge
from tests.adapters.models import llama
from tests.advised import advice
from tests.cli.runs import covmerge, words

W = torch.diag(torch.arange(1.0, 9))
STEP = 0.01 * torch.ones(8, 8).triu()
LAYER = "layers.0.mlp.up_proj.weight"
HEAD = "readout.weight"
TABLE = "embed_tokens.weight"
CODES, SCALES = "layers.0.mlp.codes", "layers.0.mlp.quant_step"
ALL_CODES, ALL_SCALES = "layers.*.mlp.codes", "layers.*.mlp.quant_step"
MORE = "layers.1.mlp.codes"
OTHER = "layers.1.mlp.up_proj.weight"
FIVE = {
    f"layers.{number}.mlp.up_proj.weight": matrix
    for number, matrix in enumerate(torch.randn(5, 8, 8, generator=torch.manual_seed(0)))
}
LONG = "layers.0.norm.weight"
BASE = {LAYER: W, "layers.0.norm.weight": torch.ones(8)}
EXPERT = BASE | {LAYER: W + STEP}


@dataclass(frozen=True)
class Case:
    """One situation.

    Attributes:
        base: tensors of the base.
        expert: tensors of expert `a`.
        said: what the error says; the setting in it is then taken.
        right: tensors of the output, as far as they are looked at.
        settings: of the recipe, beside base and experts.
        other: tensors of expert `b`, if there is one.
    """

    base: dict
    expert: dict
    said: str
    right: dict
    settings: dict = field(default_factory=lambda: {"method": "average"})
    other: dict = field(default_factory=dict)


# What is advised, in a message.
SETTING = re.compile(r"\{match: '[^']*', use: \w+\}|(?<=`)\{?\w+: [^`]*(?=`)")
RULE = r"the rule \{match: '[^']*', use: \w+\}"
ALLOW = advice("; if this is meant, go on with --allow {}")


CASES = {
    "a head of another size": Case(
        BASE | {HEAD: torch.ones(2, 8)},
        EXPERT | {HEAD: torch.ones(3, 8)},
        advice("If the tensor is a task head, add ") + RULE,
        {LAYER: W + STEP, HEAD: torch.ones(2, 8)},
    ),
    "more tensors": Case(
        BASE,
        EXPERT | {"more.weight": torch.ones(2, 8)},
        advice(
            "If these tensors may be left out, set --tensors extra=ignore; if they are a task head"
        ),
        {LAYER: W + STEP},
    ),
    "fewer tensors": Case(
        BASE | {"more.weight": torch.ones(2, 8)},
        EXPERT,
        advice("choose what their absence means: --tensors missing=base (unchanged there)"),
        {LAYER: W + STEP, "more.weight": torch.ones(2, 8)},
    ),
    "fewer tensors of one": Case(
        BASE | {"more.weight": torch.ones(2, 8)},
        EXPERT,
        advice("or --tensors missing=present (merged over the experts that have them)"),
        {LAYER: W + STEP, "more.weight": 1.5 * torch.ones(2, 8)},
        other=EXPERT | {"more.weight": 1.5 * torch.ones(2, 8), LAYER: W + STEP},
    ),
    "rows of more tokens": Case(
        BASE | {TABLE: torch.ones(4, 8)},
        EXPERT | {TABLE: 1.2 * torch.ones(5, 8)},
        advice("tokens, set --tensors vocabulary=base to merge the rows of the base"),
        {LAYER: W + STEP, TABLE: 1.2 * torch.ones(4, 8)},
    ),
    "numbers and codes": Case(
        BASE | {CODES: torch.ones(4, dtype=torch.int64)},
        EXPERT | {CODES: torch.ones(4)},
        advice("as it was before; else leave the tensor to the base with ") + RULE,
        {LAYER: W + STEP, CODES: torch.ones(4, dtype=torch.int64)},
    ),
    "complex and real numbers": Case(
        BASE | {"layers.9.filter.weight": torch.ones(4, 4, dtype=torch.complex64)},
        EXPERT | {"layers.9.filter.weight": torch.ones(4, 4)},
        advice("as it was before; else leave the tensor to the base with ") + RULE,
        {LAYER: W + STEP},
    ),
    "integers that differ": Case(
        BASE | {name: torch.ones(4, dtype=torch.int64) for name in (CODES, MORE)},
        EXPERT | {name: torch.zeros(4, dtype=torch.int64) for name in (CODES, MORE)},
        advice("If that is right, say it by ") + RULE,
        {LAYER: W + STEP, CODES: torch.ones(4, dtype=torch.int64)},
    ),
    "integers that differ, allowed": Case(
        BASE | {CODES: torch.ones(4, dtype=torch.int64)},
        EXPERT | {CODES: torch.zeros(4, dtype=torch.int64)},
        rf"{ALLOW}`allow: \[changed-integers\]`",
        {LAYER: W + STEP, CODES: torch.ones(4, dtype=torch.int64)},
    ),
    "no fine-tune": Case(
        BASE,
        EXPERT | {LAYER: W.flip(0)},
        rf"{ALLOW}`allow: \[not-a-fine-tune\]`",
        {LAYER: W.flip(0)},
    ),
    "one of two not trained": Case(
        BASE,
        EXPERT,
        rf"{ALLOW}`allow: \[unchanged-expert\]`",
        {LAYER: W + STEP / 2},
        other=BASE,
    ),
    "too large for its dtype": Case(
        {n: t.half() for n, t in BASE.items()},
        {n: t.half() for n, t in EXPERT.items()},
        advice("'{}': the {} overflow {} ({}); store them in another dtype (--out-dtype float32)"),
        {LAYER: (W + 3e7 * ((W + STEP).half().float() - W))},
        settings={"method": "task_arithmetic", "parameters": {"scale": 3e7}},
    ),
    "no layer for an adapter": Case(
        {"layers.0.norm.weight": torch.ones(8)},
        {"layers.0.norm.weight": 1.1 * torch.ones(8)},
        advice("a layer that an adapter updates: merge to a full model (--as model)"),
        {"layers.0.norm.weight": 1.1 * torch.ones(8)},
        settings={"method": "average", "output": {"format": "adapter", "rank": 2}},
    ),
    "codes and their scales": Case(
        BASE | {CODES: torch.ones(4, dtype=torch.int8), SCALES: torch.ones(4)},
        EXPERT | {CODES: torch.zeros(4, dtype=torch.int8), SCALES: 2 * torch.ones(4)},
        advice("leave both tensors to the base by ")
        + r"the rules \{match: '[^']*', use: base\} and \{match: '[^']*', use: base\}",
        {LAYER: W + STEP, CODES: torch.ones(4, dtype=torch.int8), SCALES: torch.ones(4)},
    ),
    "layers in each other's place": Case(
        FIVE,
        FIVE | {LAYER: FIVE[OTHER] + STEP, OTHER: FIVE[LAYER] + STEP},
        rf"{ALLOW}`allow: \[swapped-tensors\]`",
        {LAYER: FIVE[OTHER] + STEP, OTHER: FIVE[LAYER] + STEP},
    ),
    "too long for float32": Case(
        BASE | {LONG: torch.full((8,), -3e38)},
        EXPERT | {LONG: torch.full((8,), 3e38)},
        advice(
            "gives an update that overflows the compute dtype; compute in float64 (--dtype float64)"
        ),
        {LAYER: W + STEP, LONG: torch.full((8,), 3e38)},
    ),
    "too short for float32": Case(
        {n: 1e-60 * t.double() for n, t in BASE.items()},
        {n: 1e-60 * t.double() for n, t in EXPERT.items()},
        advice("which is nothing in {}: compute in float64 (--dtype float64)"),
        {LAYER: 1e-60 * (W + STEP).double()},
    ),
}


def save(folder, case):
    """Write the checkpoints, and return the recipe."""
    experts = {"a": case.expert} | ({"b": case.other} if case.other else {})
    for name, tensors in {"base": case.base, **experts}.items():
        save_file(tensors, folder / f"{name}.safetensors")
    named = {name: f"./{name}.safetensors" for name in experts}
    return {"base": "./base.safetensors", "experts": named, **case.settings}


def with_settings(recipe, settings):
    """The recipe with what an error advised: rules, or some of its keys."""
    rules = [yaml.safe_load(setting) for setting in settings]
    given = rules[0]
    if "match" in given:
        return recipe | {"rules": rules}
    return recipe | given


@pytest.mark.parametrize("name", CASES)
def test_the_advised_setting_works(name, tmp_path):
    case = CASES[name]
    recipe, file, out = save(tmp_path, case), tmp_path / "recipe.yml", tmp_path / "out"
    file.write_text(json.dumps(recipe))
    said = words(covmerge("merge", file, out, code=2).stderr)
    found = re.search(case.said, said)
    assert found is not None, said
    file.write_text(json.dumps(with_settings(recipe, SETTING.findall(found[0]))))
    covmerge("merge", file, out)
    covmerge("verify", out)
    merged = load_file(out / "model.safetensors")
    for tensor, right in case.right.items():
        torch.testing.assert_close(merged[tensor], right)


def test_no_setting_is_advised_where_nothing_was_trained(tmp_path):
    """The merge would be the base, which `verify` fails."""
    file = tmp_path / "recipe.yml"
    file.write_text(json.dumps(save(tmp_path, Case(BASE, BASE, "", {}))))
    said = words(covmerge("merge", file, tmp_path / "out", code=2).stderr)
    assert re.search(
        advice("No expert differs from the base: pass models that were trained from it"), said
    )
    assert "allow" not in said


@pytest.mark.parametrize("advised", ["rank: 2", "format: model"])
def test_a_full_rank_for_an_adapter(advised, tmp_path):
    torch.manual_seed(0)
    left, right = 0.05 * torch.randn(8, 2), torch.randn(2, 8)
    case = Case(BASE, BASE | {LAYER: W + left @ right}, "", {})
    recipe, file, out = save(tmp_path, case), tmp_path / "recipe.yml", tmp_path / "out"
    recipe |= {"method": "average", "output": {"format": "adapter"}}
    file.write_text(json.dumps(recipe))
    said = words(covmerge("merge", file, out, code=2).stderr)
    advised_both = advice("Say with --rank what to truncate it to, or merge to a full model")
    assert re.search(advised_both, said)
    file.write_text(
        json.dumps(recipe | {"output": {"format": "adapter"} | yaml.safe_load(advised)})
    )
    covmerge("merge", file, out)
    covmerge("verify", out)
    covmerge(
        "merge", "--base", tmp_path / "base.safetensors", "--expert", f"x={out}", tmp_path / "x"
    )
    merged = load_file(tmp_path / "x" / "model.safetensors")
    torch.testing.assert_close(merged[LAYER], W + left @ right)


def tokenizer(words):
    ids = {word: number for number, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(ids, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0")


def test_tokens_of_an_expert_are_merged_as_advised(tmp_path):
    words_of = {"base": [f"t{n}" for n in range(32)], "a": [f"t{n}" for n in range(33)]}
    torch.manual_seed(0)
    model, held = llama(), {}
    for name, known in words_of.items():
        model.resize_token_embeddings(len(known))
        model.save_pretrained(tmp_path / name)
        tokenizer(known).save_pretrained(tmp_path / name)
        held[name] = {n: t.clone() for n, t in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data += 1e-3 * torch.randn_like(parameter)
    file, out = tmp_path / "recipe.yml", tmp_path / "out"
    recipe = {"base": "./base", "experts": {"a": "./a"}, "method": "average"}
    file.write_text(json.dumps(recipe))
    said = words(covmerge("merge", file, out, code=2).stderr)
    found = re.search(advice("Merge them by token with --tokenizer union; or"), said)
    assert found is not None, said
    file.write_text(json.dumps(with_settings(recipe, SETTING.findall(found[0]))))
    covmerge("merge", file, out)
    covmerge("verify", out)
    merged = load_file(out / "model.safetensors")
    for name, right in held["a"].items():
        torch.testing.assert_close(merged[name], right)
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("t32") == 32

    by_flag, in_python = tmp_path / "by-flag", tmp_path / "in-python"
    base, expert = tmp_path / "base", tmp_path / "a"
    covmerge("merge", "--base", base, "--expert", f"a={expert}", *FLAG, by_flag)
    merge(base, {"a": expert}, "average", in_python, tokenizer="union")
    for other in (by_flag, in_python):
        found = load_file(other / "model.safetensors")
        assert found.keys() == merged.keys()
        assert all(torch.equal(found[name], merged[name]) for name in merged)


FLAG = ("--method", "average", "--tokenizer", "union")
