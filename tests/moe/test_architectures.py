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
from covmerge.base.errors import InputError
from covmerge.plan.recipe import load_recipe
from tests.advised import advice

seeded: Any = torch.manual_seed  # pyright: ignore[reportUnknownMemberType]
NAMES = ("code", "math", "chat")
LAYERS = 2
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mistral", {}),
    "qwen2_moe": ("qwen2", {}),
    "qwen3_moe": ("qwen3", {"head_dim": 8}),
}
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
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        **settings,
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
    """All experts' MLPs, weighed by the softmax of a router's products; with a shared one half of both."""

    def __init__(self, gate: Tensor, experts: list[Any], shared: Any) -> None:
        super().__init__()
        self.shared = shared
        self.gate, self.experts = gate.double(), torch.nn.ModuleList(experts)

    def forward(self, given: Tensor) -> Tensor:
        weights = torch.softmax(given @ self.gate.mT, -1)
        routed: Any = sum(weights[..., n, None] * own(given) for n, own in enumerate(self.experts))
        return routed if self.shared is None else (routed + self.shared(given)) / 2


@pytest.mark.parametrize("architecture", DENSE)
def test_a_mixture_is_its_experts_added_up(architecture: str, tmp_path: Path) -> None:
    kind, settings = DENSE[architecture]
    out = made(tmp_path, recipe_of(experts_of(kind, tmp_path, **settings), architecture))
    told = json.loads((out / "config.json").read_text())
    assert told["model_type"] == architecture
    uniform = tmp_path / "uniform"
    shutil.copytree(out, uniform)
    tensors = load_file(out / "model.safetensors")
    gates = [
        n for n in tensors if n.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))
    ]
    assert len(gates) == LAYERS
    zero = tensors | {name: torch.zeros_like(tensors[name]) for name in gates}
    save_file(zero, uniform / "model.safetensors", metadata={"format": "pt"})
    for folder, given in ((out, tensors), (uniform, zero)):
        dense = loaded(tmp_path / "base")
        experts = [loaded(tmp_path / name) for name in NAMES]
        for number, layer in enumerate(dense.model.layers):
            own = [expert.model.layers[number].mlp for expert in experts]
            shared = layer.mlp if architecture == "qwen2_moe" else None
            layer.mlp = ByHand(given[sorted(gates)[number]], own, shared)
        mixture, loading = loaded(folder, experts_implementation="eager", output_loading_info=True)
        assert not any(loading.values()), loading
        with torch.no_grad():
            torch.testing.assert_close(mixture(TOKENS).logits, dense(TOKENS).logits)
    written = mixture.generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert written.shape[1] > TOKENS.shape[1]


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
