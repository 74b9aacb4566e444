"""The model of several scripts here: a Llama of two layers, what it says, and adapters of it."""

import warnings

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

__all__ = [
    "AutoModelForCausalLM",
    "LlamaForCausalLM",
    "base",
    "config",
    "logits",
    "off",
    "tuned",
]

warnings.filterwarnings("ignore")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
base = LlamaForCausalLM(config).eval()


def logits(model):
    """What a model gives for ten tokens."""
    with torch.no_grad():
        return model.eval()(torch.arange(10)[None]).logits


def off(found, right, start=base):
    """How far logits are from the right ones, beside what the adapter does."""
    return float((found - right).norm() / (right - logits(start)).norm())


def tuned(model, size=0.1):
    """An adapter as if it had been trained: random numbers are added to what it trains."""
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data += size * torch.randn_like(parameter)
    return model
