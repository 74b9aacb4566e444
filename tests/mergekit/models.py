"""Tiny models that recipes of mergekit merge; nothing here imports mergekit or covmerge."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.mergekit.numbers import normal, normals

LAYERS = 4
CONFIGS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 24,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 8,
        "n_head": 2,
        "n_layer": LAYERS,
        "n_positions": 16,
        "n_ctx": 16,
        "vocab_size": 24,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        **{"d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2, "vocab_size": 24},
        **{"num_layers": 2, "num_decoder_layers": 2, "relative_attention_num_buckets": 4},
        "feed_forward_proj": "gated-gelu",
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}
EXPERTS = 3
ADAPTERS = 2
# By folder: the architecture, and the dtype of the base and of each expert, one for all or in turns.
SETS = {
    "llama": ("llama", "float32"),
    "gpt2": ("gpt2", "float32"),
    "half": ("llama", "bfloat16"),
    "float16": ("llama", "float16"),
    "mixed": ("llama", "bfloat16", "float32", "float16", "bfloat16"),
}
COMPOSITE = {"t5": ("t5", "float32")}


def layout(arch: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as transformers stores them."""
    if arch == "gpt2":
        yield from (("transformer.wte.weight", (24, 8)), ("transformer.wpe.weight", (16, 8)))
        for i in range(LAYERS):
            for norm in ("ln_1", "ln_2"):
                yield from (
                    (f"transformer.h.{i}.{norm}.{leaf}", (8,)) for leaf in ("weight", "bias")
                )
            for name, rows, columns in (
                *(("attn.c_attn", 8, 24), ("attn.c_proj", 8, 8)),
                *(("mlp.c_fc", 8, 32), ("mlp.c_proj", 32, 8)),
            ):
                yield f"transformer.h.{i}.{name}.weight", (rows, columns)
                yield f"transformer.h.{i}.{name}.bias", (columns,)
        yield from ((f"transformer.ln_f.{leaf}", (8,)) for leaf in ("weight", "bias"))
        return
    if arch == "t5":
        yield "shared.weight", (24, 8)
        for stack, attentions in (("encoder", ("Self",)), ("decoder", ("Self", "EncDec"))):
            bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield from ((bias, (4, 2)), (f"{stack}.final_layer_norm.weight", (8,)))
            for i in range(2):
                of = f"{stack}.block.{i}.layer."
                for place, kind in enumerate(attentions):
                    yield from ((f"{of}{place}.{kind}Attention.{p}.weight", (8, 8)) for p in "qkvo")
                last = len(attentions)
                yield from ((f"{of}{place}.layer_norm.weight", (8,)) for place in range(last + 1))
                for name, shape in (("wi_0", (12, 8)), ("wi_1", (12, 8)), ("wo", (8, 12))):
                    yield f"{of}{last}.DenseReluDense.{name}.weight", shape
        return
    yield "model.embed_tokens.weight", (24, 8)
    for i in range(LAYERS):
        for name, shape in (
            *(("self_attn.q_proj", (8, 8)), ("self_attn.k_proj", (4, 8))),
            *(("self_attn.v_proj", (4, 8)), ("self_attn.o_proj", (8, 8))),
            *(("mlp.gate_proj", (12, 8)), ("mlp.up_proj", (12, 8)), ("mlp.down_proj", (8, 12))),
            *(("input_layernorm", (8,)), ("post_attention_layernorm", (8,))),
        ):
            yield f"model.layers.{i}.{name}.weight", shape
    yield from (("model.norm.weight", (8,)), ("lm_head.weight", (24, 8)))


def weights(arch: str, model: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the base (`base`), or of an expert (`t0`, ...)."""
    found: dict[str, Tensor] = {}
    for name, shape in layout(arch):
        own = normal(shape, arch, name)
        if model != "base":
            number = int(model[1:]) + 1
            own += 0.05 * number * normal(shape, arch, model, name)
        found[name] = own.to(dtype).contiguous()
    return found


def save_models(folder: Path) -> None:
    """Write each set of `SETS` and of `COMPOSITE`, a base and experts each, and two adapters of gpt2."""
    for name, (arch, *dtypes) in {**SETS, **COMPOSITE}.items():
        for number, model in enumerate(("base", *(f"t{t}" for t in range(EXPERTS)))):
            dtype = dtypes[number % len(dtypes)]
            path = folder / name / model
            path.mkdir(parents=True)
            stored = weights(arch, model, getattr(torch, dtype))
            save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
            (path / "config.json").write_text(json.dumps({**CONFIGS[arch], "torch_dtype": dtype}))
    for t in range(ADAPTERS):
        _save_adapter(folder / "gpt2" / f"lora{t}", t)


def _save_adapter(path: Path, number: int) -> None:
    path.mkdir()
    tensors: dict[str, Tensor] = {}
    for i in range(LAYERS):
        for module, columns in (("attn.c_attn", 24), ("mlp.c_fc", 32)):
            key = f"base_model.model.transformer.h.{i}.{module}."
            a, b = normals([(2, 8), (columns, 2)], "lora", number, i, module)
            tensors[f"{key}lora_A.weight"] = 0.2 * a
            tensors[f"{key}lora_B.weight"] = 0.2 * b
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4},
        **{"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": True, "inference_mode": True},
        "base_model_name_or_path": str(path.parent / "base"),
        "target_modules": ["c_attn", "c_fc"],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All tensors behind one another, by their names: one vector a recipe keeps the file small."""
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])
