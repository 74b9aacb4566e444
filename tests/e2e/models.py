"""Tiny real models, built from their configs, and experts of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

TEXT = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}

BUILDERS = {
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(
            **TEXT, num_hidden_layers=2, intermediate_size=24, max_position_embeddings=32
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **TEXT,
            num_hidden_layers=2,
            intermediate_size=24,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    ),
    "granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(
            **TEXT,
            num_hidden_layers=2,
            intermediate_size=24,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    ),
    "phi": lambda: transformers.PhiForCausalLM(
        transformers.PhiConfig(
            **TEXT, num_hidden_layers=1, intermediate_size=24, max_position_embeddings=32
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **TEXT,
            num_hidden_layers=1,
            intermediate_size=24,
            num_key_value_heads=1,
            num_local_experts=3,
            max_position_embeddings=32,
        )
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **TEXT,
            num_hidden_layers=1,
            intermediate_size=24,
            num_key_value_heads=1,
            num_local_experts=3,
            num_experts_per_tok=2,
            head_dim=8,
            max_position_embeddings=32,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    ),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=16,
            patch_size=8,
        )
    ),
    "clip": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**TEXT, "num_hidden_layers": 1, "intermediate_size": 24},
            vision_config={
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "image_size": 16,
                "patch_size": 8,
            },
            projection_dim=8,
        )
    ),
    "llava": lambda: transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(
                **TEXT, num_hidden_layers=1, intermediate_size=24, max_position_embeddings=32
            ),
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=24,
                image_size=16,
                patch_size=8,
            ),
            image_token_index=63,
        )
    ),
}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def build(name: str, seed: int = 0) -> torch.nn.Module:
    """A model with random weights, which are large beside the steps of its experts."""
    with _seeded(seed), torch.no_grad():
        model = BUILDERS[name]().eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(10.0)
        return model


def fine_tuned(base: torch.nn.Module, seed: int, scale: float = 0.02) -> torch.nn.Module:
    """A copy whose floating-point parameters all moved a little."""
    expert = copy.deepcopy(base)
    with _seeded(seed), torch.no_grad():
        for parameter in expert.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return expert


def save_family(
    name: str, folder: Path, experts: int = 3, **options: object
) -> tuple[Path, dict[str, Path]]:
    """Save a base and its experts as Hugging Face folders."""
    base = build(name)
    base.save_pretrained(folder / "base", **options)
    paths = {}
    for number in range(1, experts + 1):
        path = folder / f"expert{number}"
        fine_tuned(base, seed=number, scale=0.005 * 3**number).save_pretrained(path, **options)
        paths[f"e{number}"] = path
    return folder / "base", paths


def run(model: torch.nn.Module) -> torch.Tensor:
    """One forward pass; its first floating-point output."""
    ids = torch.arange(12).reshape(2, 6)
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    inputs = {
        "vit": {"pixel_values": pixels},
        "clip": {"pixel_values": pixels, "input_ids": ids},
        "t5": {"input_ids": ids, "decoder_input_ids": ids},
    }.get(model.config.model_type, {"input_ids": ids})
    with torch.no_grad():
        return model(**inputs)[0]
