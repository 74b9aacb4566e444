"""Mixtures of each architecture against their dense experts, added up by hand, in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import covmerge
from covmerge.base.errors import InputError, TensorError
from covmerge.plan.moe.architectures import ARCHITECTURES
from covmerge.plan.recipe import load_recipe
from tests.advised import advice

seeded: Any = torch.manual_seed  # pyright: ignore[reportUnknownMemberType]
NAMES = ("code", "math", "chat")
LAYERS = 2
MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
DENSE: dict[tuple[str, str], dict[str, Any]] = {
    ("mixtral", "mistral"): {},
    ("mixtral", "llama"): {"head_dim": 8},
    ("qwen2_moe", "qwen2"): {},
    ("qwen2_moe", "llama"): {"head_dim": 8},
    ("qwen2_moe", "mistral"): {"sliding_window": None},
    ("qwen3_moe", "qwen3"): {"head_dim": 8},
    ("flex_olmo", "olmo2"): {},
    ("deepseek_v3", "youtu"): {**MLA, "num_key_value_heads": 4},
}
SHARED = ("qwen2_moe", "deepseek_v3")
TOKENS = torch.arange(3, 40).reshape(1, -1)


def experts_of(kind: str, root: Path, **settings: Any) -> Path:
    """A base and its experts of a dense architecture."""
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        **{"num_key_value_heads": 2, **settings},
    )
    loader: Any = transformers.AutoModelForCausalLM
    seeded(0)
    base = loader.from_config(config)
    for name in ("base", *NAMES):
        model = loader.from_config(config)
        model.load_state_dict(base.state_dict())
        for parameter in model.parameters():
            parameter.data += 0.004 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
    return root


def recipe_of(root: Path, architecture: str, **moe: Any) -> dict[str, Any]:
    return {
        "base": str(root / "base"),
        "experts": {name: str(root / name) for name in NAMES},
        "moe": {"architecture": architecture, "gates": "update", "experts_per_token": 3, **moe},
        "rules": [{"match": "*", "use": "base"}],
    }


def made(root: Path, recipe: dict[str, Any]) -> Path:
    file = root / "recipe.yml"
    file.write_text(json.dumps(recipe))
    covmerge.run_recipe(load_recipe(file), root / "out")
    assert covmerge.verify(root / "out").ok
    return root / "out"


def loaded(folder: Path, **more: Any) -> Any:
    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float64, **more)


class ByHand(torch.nn.Module):
    """All experts' MLPs, each times its factor and its weight by the router, and a shared one."""

    def __init__(
        self,
        gate: Tensor,
        experts: list[tuple[Any, float]],
        shared: tuple[Any, float] | None,
        *,
        sigmoid: bool = False,
        shared_gate: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.sigmoid, self.shared_gate = gate.double(), sigmoid, shared_gate
        self.experts, self.shared = experts, shared

    def forward(self, given: Tensor) -> Tensor:
        products = given @ self.gate.mT
        weights = torch.softmax(products, -1)
        if self.sigmoid:
            weights = torch.sigmoid(products)
            weights = weights / weights.sum(-1, keepdim=True)
        total: Any = sum(
            weights[..., n, None] * own(given) * factor
            for n, (own, factor) in enumerate(self.experts)
        )
        if self.shared is None:
            return total
        mlp, factor = self.shared
        share = factor * mlp(given)
        if self.shared_gate is not None:
            share = share * torch.sigmoid(given @ self.shared_gate.double().mT)
        return total + share


def gates_in(tensors: dict[str, Tensor]) -> list[str]:
    ends = (".mlp.gate.weight", ".block_sparse_moe.gate.weight")
    return sorted(name for name in tensors if name.endswith(ends))


def agrees(out: Path, by_hand: Any) -> Any:
    """The mixture, after its logits were those of a dense model with other MLPs, in float64.

    transformers computes routers in float32; DeepSeek's products too, which are no small numbers here.
    """
    mixture, loading = loaded(out, experts_implementation="eager", output_loading_info=True)
    assert not any(loading.values()), loading
    apart = 2e-6 if "Deepseek" in type(mixture).__name__ else 1e-7
    with torch.no_grad():
        found, wanted = mixture(TOKENS).logits, by_hand(TOKENS).logits
    torch.testing.assert_close(found, wanted, rtol=apart, atol=apart)
    return mixture


@pytest.mark.parametrize(("architecture", "kind"), DENSE)
def test_a_mixture_is_its_experts_added_up(architecture: str, kind: str, tmp_path: Path) -> None:
    experts_of(kind, tmp_path, **DENSE[architecture, kind])
    out = made(tmp_path, recipe_of(tmp_path, architecture))
    told = json.loads((out / "config.json").read_text())
    assert told["model_type"] == architecture
    uniform = tmp_path / "uniform"
    shutil.copytree(out, uniform)
    tensors = load_file(out / "model.safetensors")
    gates = gates_in(tensors)
    assert len(gates) == LAYERS
    zero = tensors | {name: torch.zeros_like(tensors[name]) for name in gates}
    save_file(zero, uniform / "model.safetensors", metadata={"format": "pt"})
    for folder, given in ((out, tensors), (uniform, zero)):
        dense = loaded(tmp_path / "base")
        experts = [loaded(tmp_path / name) for name in NAMES]
        for number, layer in enumerate(dense.model.layers):
            half = 0.5 if architecture in SHARED else 1.0
            own = [(expert.model.layers[number].mlp, half) for expert in experts]
            shared = (layer.mlp, half) if architecture in SHARED else None
            sigmoid = architecture == "deepseek_v3"
            layer.mlp = ByHand(given[gates[number]], own, shared, sigmoid=sigmoid)
        mixture = agrees(folder, dense)
    written = mixture.generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert written.shape[1] > TOKENS.shape[1]


@pytest.mark.parametrize(
    ("architecture", "kind", "gated"),
    [("qwen2_moe", "llama", True), ("qwen2_moe", "qwen2", False), ("deepseek_v3", "youtu", False)],
)
def test_an_expert_is_shared_and_experts_are_scaled(
    architecture: str, kind: str, gated: bool, tmp_path: Path
) -> None:
    experts_of(kind, tmp_path, **DENSE[architecture, kind])
    scales = {"code": 0.3, "chat": 1.5}
    shared = {"expert": "chat", "gated": gated}
    recipe = recipe_of(
        tmp_path,
        architecture,
        gates="random",
        shared=shared,
        residual_scale=scales,
        experts_per_token=2,
    )
    out = made(tmp_path, recipe)
    tensors = load_file(out / "model.safetensors")
    seeded(0)
    drawn = torch.randn(LAYERS, 3, 16)
    dense = loaded(tmp_path / "base")
    code, math, chat = (loaded(tmp_path / name) for name in NAMES)
    for number, layer in enumerate(dense.model.layers):
        gate = tensors[gates_in(tensors)[number]]
        assert torch.equal(gate, drawn[number, :2])
        own = [(code.model.layers[number].mlp, 0.3), (math.model.layers[number].mlp, 0.5)]
        layer.mlp = ByHand(
            gate,
            own,
            (chat.model.layers[number].mlp, 1.5),
            sigmoid=architecture == "deepseek_v3",
            shared_gate=drawn[number, 2:] if gated else None,
        )
    agrees(out, dense)


def test_a_scale_that_a_dtype_cannot_hold(tmp_path: Path) -> None:
    experts_of("llama", tmp_path, head_dim=8)
    for name in ("base", *NAMES):
        file = tmp_path / name / "model.safetensors"
        half = {own: tensor.half() for own, tensor in load_file(file).items()}
        save_file(half, file, metadata={"format": "pt"})
    said = advice("times its scale of {} exceeds {}: write a smaller one under moe.residual_scale")
    with pytest.raises(TensorError, match=said):
        made(tmp_path, recipe_of(tmp_path, "mixtral", residual_scale={"code": 1e9}))
    made(tmp_path, recipe_of(tmp_path, "mixtral", residual_scale={"code": 2.0}))


@pytest.mark.parametrize(("architecture", "kind"), DENSE)
def test_what_a_config_leaves_unsaid_is_the_bases(architecture: str, kind: str) -> None:
    """What both classes know and assume otherwise is written, but for sizes that every config says."""
    said = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    said |= {"bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "model_type"}
    dense: Any = transformers.AutoConfig.for_model(kind)
    base = {"model_type": kind} | {key: getattr(dense, key) for key in said - {"model_type"}}
    if (architecture, kind) == ("qwen2_moe", "mistral"):
        base["sliding_window"] = None
    mixed = ARCHITECTURES[architecture].config(base, 3, 2)
    found: Any = transformers.AutoConfig.for_model(**mixed)
    skipped = said | {"sliding_window", "layer_types", "transformers_version"}
    assumed: Any = transformers.AutoConfig.for_model(**base).to_dict()
    for key, value in assumed.items():
        if key not in skipped and key in found.to_dict() and value is not None:
            own = getattr(found, key)
            assert own == value or (key == "head_dim" and own is None), key


def test_the_form_of_a_base_is_said(tmp_path: Path) -> None:
    experts_of("qwen3", tmp_path, head_dim=8)
    said = advice("{}: write `architecture: {}` under moe")
    with pytest.raises(InputError, match=said):
        made(tmp_path, recipe_of(tmp_path, "mixtral"))
    made(tmp_path, recipe_of(tmp_path, "qwen3_moe"))


def test_a_window_that_a_mixture_has_not(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    experts_of("qwen3", tmp_path, head_dim=8, **window)
    said = advice("the base's config.json says {}, which {} has not: choose a base without")
    with pytest.raises(InputError, match=said):
        made(tmp_path, recipe_of(tmp_path, "qwen3_moe"))
    experts_of("qwen3", tmp_path, head_dim=8)
    made(tmp_path, recipe_of(tmp_path, "qwen3_moe"))
