"""Tiny models of many architectures, saved by transformers and read back as headers."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.tensors.describe import ModelDescription, describe

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "head_dim": 8, "num_experts_per_tok": 1}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
CLIP = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}
FALCON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}

# architecture, config: what the tests build
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", TEXT),
    "bert_classifier": ("BertForSequenceClassification", "BertConfig", TEXT),
    "bert_mlm": ("BertForMaskedLM", "BertConfig", TEXT),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {**TEXT, "pad_token_id": 1}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2_cross": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "add_cross_attention": True}),
    "gpt2_classifier": ("GPT2ForSequenceClassification", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "num_local_experts": 2}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**EXPERTS, "num_experts": 2, "moe_intermediate_size": 24},
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**EXPERTS, "num_local_experts": 2}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**EXPERTS, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE),
    "clip": ("CLIPModel", "CLIPConfig", CLIP),
    "clip_classifier": ("CLIPForImageClassification", "CLIPConfig", CLIP),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "pad_token_id": 0}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    ),
    "falcon_multi_query": ("FalconForCausalLM", "FalconConfig", {**FALCON, "multi_query": True}),
    "falcon_multi_head": ("FalconForCausalLM", "FalconConfig", {**FALCON, "multi_query": False}),
    "falcon_grouped": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 16},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TEXT, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    ),
}


@dataclass(frozen=True)
class Saved:
    """A model, and what save_pretrained wrote of it."""

    model: Any
    tensors: dict[str, Tensor]
    config: dict[str, Any]

    @property
    def headers(self) -> dict[str, TensorHeader]:
        return headers_of(self.tensors)

    def describe(self) -> ModelDescription:
        return describe(self.headers, self.config)


def headers_of(tensors: dict[str, Tensor]) -> dict[str, TensorHeader]:
    return {n: TensorHeader(n, tuple(t.shape), t.dtype) for n, t in tensors.items()}


def shapes(**named: tuple[int, ...]) -> dict[str, TensorHeader]:
    """Headers of float32 tensors by shape; `__` in a keyword stands for a dot."""
    names = {name.replace("__", "."): shape for name, shape in named.items()}
    return {name: TensorHeader(name, shape, torch.float32) for name, shape in names.items()}


@cache
def saved(key: str) -> Saved:
    architecture, config_class, values = MODELS[key]
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, config_class)(**values))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        tensors = load_file(Path(folder) / "model.safetensors")
    return Saved(model.eval(), tensors, config)
