"""Tiny models, adapters that PEFT makes of them, and what its own merge of the two gives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.open import open_checkpoint


@dataclass
class Made:
    """An adapter on disk, its base, and PEFT's merge of both."""

    folder: Path
    base: dict[str, Tensor]
    merged: dict[str, Tensor]

    def open(self) -> AdapterCheckpoint:
        adapter = open_checkpoint(self.folder)
        assert isinstance(adapter, AdapterCheckpoint)
        return adapter


def bert() -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            vocab_size=30,
            max_position_embeddings=12,
        )
    )


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30, n_positions=12)
    )


def llama(**changes: object) -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 30,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


def qwen2() -> nn.Module:
    config = llama().config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    sizes = {name: getattr(config, name) for name in (*names, "num_attention_heads")}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2))


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=8,
            patch_size=4,
        )
    )


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=3,
            vocab_size=30,
        )
    )


def gpt_oss() -> nn.Module:
    return GptOssForCausalLM(
        GptOssConfig(
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=3,
            num_experts_per_tok=2,
            vocab_size=30,
        )
    )


class Attention(nn.Module):
    """What open_clip and torchvision build their transformers of, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 2)
        self.point = nn.Conv2d(8, 8, 1)
        self.attn = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 4)


def save(base: nn.Module, config: PeftConfig, folder: Path) -> None:
    """Save an adapter as it is before training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(base, config).save_pretrained(str(folder))


def make(
    build: Callable[[], nn.Module],
    config: PeftConfig,
    folder: Path,
    *,
    before: Callable[[PeftModel], None] = lambda model: None,
    **saving: object,
) -> Made:
    """Train (at random) an adapter with PEFT, save it, and merge it with PEFT."""
    torch.manual_seed(0)
    base = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), config)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
        before(model)
        model.save_pretrained(str(folder), **saving)
        merged = copy.deepcopy(model).merge_and_unload()
    return Made(folder, stored(base), stored(merged))


def stored(model: nn.Module) -> dict[str, Tensor]:
    """State of a model as it is saved: of tied tensors, the first."""
    return {
        name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def applied(adapter: AdapterCheckpoint, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """Base and adapter together."""
    result = dict(base)
    result |= {name: adapter.read(name) for name in adapter.headers}
    for name, header in adapter.low_rank.items():
        factors = adapter.read_factors(name)
        assert factors.shape == header.shape == (base[name].shape[0], base[name][0].numel())
        assert factors.rank == header.rank
        result[name] = base[name] + factors.dense().view(base[name].shape)
    return result


def assert_merges(made: Made, *, updates: int, replaced: int = 0) -> AdapterCheckpoint:
    """Check that base and adapter are, tensor by tensor, what PEFT merges them to."""
    adapter = made.open()
    result = applied(adapter, made.base)
    assert result.keys() == made.merged.keys()
    for name, value in made.merged.items():
        torch.testing.assert_close(result[name], value, rtol=1e-6, atol=1e-6)
    assert (len(adapter.low_rank), len(adapter.headers)) == (updates, replaced)
    return adapter
