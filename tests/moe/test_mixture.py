"""Dense experts as one mixture: against transformers, and against what mergekit-moe's formulas give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from typer.testing import CliRunner

import covmerge
from covmerge.base.errors import InputError, RecipeError
from covmerge.front.cli import app
from covmerge.plan.recipe import load_recipe
from tests.verification.test_recompute import forge

NAMES = ("code", "math", "chat")
seeded: Any = torch.manual_seed  # pyright: ignore[reportUnknownMemberType]
MLP = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers
    from tokenizers import models as kinds
    from tokenizers import pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("dense")
    words = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(61))]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = tokenizers.Tokenizer(kinds.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
    )
    seeded(0)
    base: Any = LlamaForCausalLM(config)
    for name in ("base", *NAMES):
        model: Any = LlamaForCausalLM(config)
        model.load_state_dict(base.state_dict())
        if name != "base":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def theirs(models: Path, **more: Any) -> dict[str, Any]:
    prompts = (["w1 w2 w3", "w4"], ["w5 w6"], ["w7 w8 w1"])
    experts: list[dict[str, Any]] = [
        {"source_model": str(models / name), "positive_prompts": said}
        for name, said in zip(NAMES, prompts, strict=True)
    ]
    experts[0]["negative_prompts"] = ["w9"]
    return {
        "base_model": str(models / "base"),
        "gate_mode": "cheap_embed",
        "experts": experts,
        **more,
    }


def made(models: Path, folder: Path, recipe: dict[str, Any]) -> Path:
    file = folder / "recipe.yml"
    file.write_text(json.dumps(recipe))
    covmerge.run_recipe(load_recipe(file), folder / "out")
    return folder / "out"


def test_experts_are_the_mlps_and_gates_the_mean_embeddings(models: Path, tmp_path: Path) -> None:
    out = made(models, tmp_path, theirs(models))
    found, base = load_file(out / "model.safetensors"), load_file(models / "base/model.safetensors")
    for index, name in enumerate(NAMES):
        expert = load_file(models / name / "model.safetensors")
        for layer in range(2):
            for own, dense in MLP.items():
                stem = f"model.layers.{layer}"
                moved = found.pop(f"{stem}.block_sparse_moe.experts.{index}.{own}.weight")
                assert torch.equal(moved, expert[f"{stem}.mlp.{dense}.weight"])
    rows = base["model.embed_tokens.weight"].double()

    def unit(row: torch.Tensor) -> torch.Tensor:
        return row / (row @ row).sqrt()

    # BOS is token 0, w0 is token 3, and each prompt begins with BOS.
    first = unit(2 * rows[0] + rows[[4, 5, 6, 7]].sum(0)) - unit(rows[0] + rows[12])
    second, third = rows[[0, 8, 9]].sum(0), rows[[0, 10, 11, 4]].sum(0)
    wanted = torch.stack([unit(first), unit(second), unit(third)])
    for layer in range(2):
        gate = found.pop(f"model.layers.{layer}.block_sparse_moe.gate.weight")
        torch.testing.assert_close(gate.double(), wanted, rtol=1e-5, atol=1e-6)
    assert found.keys() == {name for name in base if ".mlp." not in name}
    assert all(torch.equal(tensor, base[name]) for name, tensor in found.items())
    assert covmerge.verify(out).ok
    assert CliRunner().invoke(app, ["verify", "--deep", str(out)]).exit_code == 0


def test_equal_experts_are_the_dense_model_and_it_generates(models: Path, tmp_path: Path) -> None:
    """Defaults of the base's architecture that a mixture has otherwise are part of the output's config."""
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    for name in ("base", "code"):
        shutil.copytree(models / name, tmp_path / name)
        file = tmp_path / name / "config.json"
        said = json.loads(file.read_text())
        for key in ("rope_parameters", "num_key_value_heads", "rms_norm_eps"):
            del said[key]
        file.write_text(json.dumps(said))
    code = str(tmp_path / "code")
    recipe = {
        "base": str(tmp_path / "base"),
        "experts": {"one": code, "two": code},
        "moe": {"gates": "random", "seed": 3, "experts_per_token": 1},
        "rules": [{"match": "*", "use": "base"}],
    }
    out = made(models, tmp_path, recipe)
    dense: Any = loader.from_pretrained(recipe["base"], dtype=torch.float64)
    tuned: Any = loader.from_pretrained(code, dtype=torch.float64)
    for own, other in zip(dense.model.layers, tuned.model.layers, strict=True):
        own.mlp = other.mlp
    mixture: Any = loader.from_pretrained(out, dtype=torch.float64, experts_implementation="eager")
    assert type(mixture).__name__ == "MixtralForCausalLM"
    tokens = torch.arange(3, 40).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(mixture(tokens).logits, dense(tokens).logits)
    written = mixture.generate(tokens, max_new_tokens=4, do_sample=False)
    assert written.shape[1] > tokens.shape[1]
    gates = load_file(out / "model.safetensors")["model.layers.1.block_sparse_moe.gate.weight"]
    seeded(3)
    assert torch.equal(gates, torch.randn(2, 2, 16)[1])


def test_attention_is_merged_by_the_recipes_method(models: Path, tmp_path: Path) -> None:
    recipe = {
        "base": str(models / "base"),
        "experts": {name: str(models / name) for name in NAMES},
        "method": "average",
        "moe": {"gates": "uniform_random"},
    }
    found = load_file(made(models, tmp_path, recipe) / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    parts = [load_file(models / own / "model.safetensors")[name].double() for own in NAMES]
    mean = torch.stack(parts).mean(0)
    torch.testing.assert_close(found[name].double(), mean, rtol=1e-5, atol=1e-7)
    dense = load_file(models / "chat/model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(found["model.layers.1.block_sparse_moe.experts.2.w3.weight"], dense)


def test_a_rule_for_what_the_mixture_makes_is_noted(models: Path) -> None:
    recipe = {
        "base": str(models / "base"),
        "experts": {name: str(models / name) for name in NAMES},
        "method": "average",
        "moe": {"gates": "random"},
    }
    for pattern, count in (("*experts*", 6 * len(NAMES)), ("*.block_sparse_moe.gate.*", 2)):
        rules = [{"match": pattern, "use": "base"}, {"match": "*norm*", "use": "base"}]
        plan, *_ = covmerge.plan_recipe(covmerge.parse_recipe({**recipe, "rules": rules}))
        (note,) = [note for note in plan.notes if "does not act" in note]
        assert f"'{pattern}' does not act on {count} tensors of the mixture" in note


def test_prompts_that_hardly_differ_are_warned_of(models: Path, tmp_path: Path) -> None:
    recipe = theirs(models)
    for number, expert in enumerate(recipe["experts"]):
        expert["positive_prompts"] = ["w1 w2 w3 w4 w5 w6 w7 w8 " * 8 + f"w{number + 20}"]
        expert.pop("negative_prompts", None)
    file = tmp_path / "recipe.yml"
    file.write_text(json.dumps(recipe))
    result = covmerge.run_recipe(load_recipe(file), tmp_path / "out")
    assert any("gates are nearly dependent in 2 of 2 layers" in note for note in result.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_mode": "deep"}, "gate_mode is 'deep'"),
        ({"architecture": "mixtral", "shared_experts": [{"source_model": "x"}]}, "is neither"),
        ({"shared_experts": [{"source_model": "x"}], "gate_mode": "random"}, "is either"),
        ({"architecture": "gpt"}, "architecture is 'gpt'"),
        ({"gatemode": "random"}, "unknown key 'gatemode'"),
        ({"experts_per_token": 4}, "experts_per_token is 4, and there are 3 experts"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    models: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "recipe.yml"
    file.write_text(json.dumps(theirs(models, **change)))
    with pytest.raises(RecipeError, match=message):
        load_recipe(file)


def test_a_base_that_no_mixture_holds_is_refused(models: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    own: Any = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    own.save_pretrained(tmp_path / "gpt2")
    recipe = {
        "base": str(tmp_path / "gpt2"),
        "experts": {name: str(tmp_path / "gpt2") for name in ("one", "two")},
        "moe": {"gates": "random"},
    }
    with pytest.raises(InputError, match="a mixture is made of models of llama or mistral"):
        made(models, tmp_path, recipe)


def without_prompts(models: Path, *experts: str) -> dict[str, Any]:
    return {
        "base": str(models / "base"),
        "experts": {name: str(models / name) for name in experts},
        "moe": {"gates": "update"},
        "rules": [{"match": "*", "use": "base"}],
    }


def test_gates_are_what_updates_read(models: Path, tmp_path: Path) -> None:
    """The leading right singular vector of both matrices, towards the mean embedding behind the norm."""
    out = made(models, tmp_path, without_prompts(models, *NAMES))
    found = load_file(out / "model.safetensors")
    base = {n: t.double() for n, t in load_file(models / "base/model.safetensors").items()}
    mean = base["model.embed_tokens.weight"].mean(0)
    for layer in range(2):
        stem = f"model.layers.{layer}"
        gate = found[f"{stem}.block_sparse_moe.gate.weight"]
        typical = mean * base[f"{stem}.post_attention_layernorm.weight"]
        for row, name in zip(gate.double(), NAMES, strict=True):
            expert = load_file(models / name / "model.safetensors")
            both = [f"{stem}.mlp.{part}.weight" for part in ("gate_proj", "up_proj")]
            update: Any = torch.cat([expert[own].double() - base[own] for own in both])
            wanted = torch.linalg.svd(update).Vh[0]
            wanted = wanted if wanted @ typical > 0 else -wanted
            torch.testing.assert_close(row, wanted, rtol=1e-6, atol=1e-7)
    for deep in ([], ["--deep"]):
        ran = CliRunner().invoke(app, ["verify", *deep, str(out)])
        assert ran.exit_code == 0, ran.output
    covmerge.run_recipe(load_recipe(tmp_path / "recipe.yml"), tmp_path / "again")
    first, second = (
        (tmp_path / own / "model.safetensors").read_bytes() for own in ("out", "again")
    )
    assert first == second


def test_a_router_that_was_changed_is_found(models: Path, tmp_path: Path) -> None:
    """It is computed with the experts at hand, so no copy of the base's tells."""
    out = made(models, tmp_path, without_prompts(models, *NAMES))
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    forge(out, gate, lambda router: router.roll(1, 0))
    assert covmerge.verify(out).ok
    ran = CliRunner().invoke(app, ["verify", "--deep", "--json", str(out)])
    (failed,) = [check for check in json.loads(ran.output)["checks"] if not check["ok"]]
    assert failed["detail"].endswith(f"of the routers these are not: '{gate}'")
    assert ran.exit_code == 1


def test_an_update_of_nothing_reads_nothing(models: Path, tmp_path: Path) -> None:
    recipe = without_prompts(models, "base", "code") | {"allow": ["unchanged-expert"]}
    found = load_file(made(models, tmp_path, recipe) / "model.safetensors")
    gate = found["model.layers.1.block_sparse_moe.gate.weight"].double()
    assert gate.square().sum(1).sqrt().tolist() == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("mode", ["hidden", "hidden_avg"])
def test_gates_are_what_the_base_makes_of_prompts(mode: str, models: Path, tmp_path: Path) -> None:
    """The residual stream before each layer; a prompt alone gives what it gives beside a longer one."""
    import transformers

    out = made(models, tmp_path, theirs(models, gate_mode=mode))
    found = load_file(out / "model.safetensors")
    loader: Any = transformers.AutoModelForCausalLM
    base = loader.from_pretrained(models / "base", dtype=torch.float64)
    # BOS is token 0, which stands before a shorter prompt too; w0 is token 3.
    shown = [([[0, 4, 5, 6], [0, 0, 0, 7]], [[0, 12]]), ([[0, 8, 9]], []), ([[0, 10, 11, 4]], [])]

    def states(prompts: list[list[int]]) -> torch.Tensor:
        seen = torch.tensor([[1] * len(one) for one in prompts])
        if len(prompts) > 1:
            seen[1, :2] = 0
        with torch.no_grad():
            run = base(torch.tensor(prompts), attention_mask=seen, output_hidden_states=True)
        each = torch.stack(run.hidden_states[:-1])
        return (each[:, :, -1] if mode == "hidden" else each.mean(2)).mean(1)

    for index, (positive, negative) in enumerate(shown):
        row = states(positive) - (states(negative) if negative else 0)
        row = row / row.square().sum(-1, keepdim=True).sqrt()
        for layer in range(2):
            gate = found[f"model.layers.{layer}.block_sparse_moe.gate.weight"][index].double()
            torch.testing.assert_close(gate, row[layer], rtol=0.05, atol=0.02)  # of bfloat16
    for deep in ([], ["--deep"]):
        ran = CliRunner().invoke(app, ["verify", *deep, str(out)])
        assert ran.exit_code == 0, ran.output


def test_prompts_that_say_nothing_to_the_base_are_refused(models: Path, tmp_path: Path) -> None:
    recipe = theirs(models, gate_mode="hidden")
    recipe["experts"][0]["negative_prompts"] = recipe["experts"][0]["positive_prompts"]
    with pytest.raises(InputError, match="the gate of the prompt 'w1 w2 w3' is zero"):
        made(models, tmp_path, recipe)


def test_their_file_with_a_shared_expert(models: Path, tmp_path: Path) -> None:
    """Weights as they are but for the scale they are given, and a gate of its prompts."""
    shared = {"source_model": str(models / "chat"), "positive_prompts": ["w20"]}
    recipe = theirs(models, architecture="qwen", shared_experts=[shared])
    del recipe["experts"][2]
    recipe["experts"][0]["residual_scale"] = 0.25
    found = load_file(made(models, tmp_path, recipe) / "model.safetensors")
    stem = "model.layers.1.mlp"
    wanted = [("code", "experts.0", 0.25), ("math", "experts.1", 1.0), ("chat", "shared_expert", 1)]
    for name, own, scale in wanted:
        dense = load_file(models / name / "model.safetensors")
        assert torch.equal(
            found[f"{stem}.{own}.down_proj.weight"], dense[f"{stem}.down_proj.weight"] * scale
        )
        assert torch.equal(found[f"{stem}.{own}.up_proj.weight"], dense[f"{stem}.up_proj.weight"])
    rows = load_file(models / "base/model.safetensors")["model.embed_tokens.weight"].double()
    row = rows[[0, 23]].sum(0)
    gate = found[f"{stem}.shared_expert_gate.weight"][0].double()
    torch.testing.assert_close(gate, row / (row @ row).sqrt(), rtol=1e-5, atol=1e-6)
    assert covmerge.verify(tmp_path / "out").ok
    assert CliRunner().invoke(app, ["verify", "--deep", str(tmp_path / "out")]).exit_code == 0
