"""Tiny models as GGUF files, with names, orders and types as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


OF_EXPERTS = {
    **LAYER,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{own}_proj": f"ffn_{own}_shexp" for own in ("gate", "up", "down")},
}
ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


def save_moe(model: Any, path: Path, kind: str, *, vector: bool = True) -> Path:
    """Save a Mixtral, a Qwen2-MoE or a Qwen3-MoE: experts stacked, routers in float32.

    `vector`: the gate of a shared expert is stored as older converters store it.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture != "llama":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        head = model.model.layers[0].self_attn.head_dim
        writer.add_key_length(head)
        writer.add_value_length(head)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module in OUTSIDE:
            _add(writer, f"{OUTSIDE[module]}.{leaf}", tensor, kind)
            continue
        _, _, number, inner = module.split(".", 3)
        if leaf == "gate_up_proj":
            for own, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                _add(writer, f"blk.{number}.ffn_{own}_exps.weight", half, kind)
        elif leaf == "down_proj":
            _add(writer, f"blk.{number}.ffn_down_exps.weight", tensor, kind)
        else:
            own = OF_EXPERTS[inner]
            if own in heads and architecture == "llama":
                tensor = permuted(tensor, heads[own])
            plain = own.startswith("ffn_gate_inp")
            values = tensor[0] if own == "ffn_gate_inp_shexp" and vector else tensor
            _add(writer, f"blk.{number}.{own}.{leaf}", values, "F32" if plain else kind)
    return _written(writer, path)


def save_llama(
    model: Any,
    path: Path,
    kind: str,
    architecture: str = "llama",
    beside: Mapping[str, np.ndarray[Any, Any]] | None = None,
    tokenizer: str | None = None,
    scaling: Any = None,
    most: int = 0,
) -> Path:
    """Save a Llama, or what claims to be another: matrices in one type, where its blocks divide rows.

    `most`: tensors of a part, beside a first part without tensors; 0: it is one file.
    """
    config = model.config
    parts = {"split_max_tensors": most, "small_first_shard": bool(most)}
    writer = gguf.GGUFWriter(path, architecture, **parts)
    _add_sizes(writer, config)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
    if tokenizer is not None:
        writer.add_tokenizer_model(tokenizer)
        writer.add_token_scores([0.0] * config.vocab_size)
        writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        module, _, what = name.rpartition(".")
        if module in OUTSIDE:
            own = OUTSIDE[module]
        else:
            _, _, number, leaf = module.split(".", 3)
            own = f"blk.{number}.{OF_EXPERTS[leaf]}"
        kept = own.rpartition(".")[2]
        turned = kept in heads and architecture == "llama"
        _add(writer, f"{own}.{what}", permuted(tensor, heads[kept]) if turned else tensor, kind)
    for name, values in (beside or {}).items():
        writer.add_tensor(name, values)
    return _written(writer, path)


def save_gpt2(model: Any, path: Path, kind: str) -> Path:
    """Save a GPT-2, whose matrices llama.cpp transposes."""
    config = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_name("tiny")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        module, _, leaf = name.rpartition(".")
        if module in GPT2:
            own = GPT2[module]
        else:
            _, _, number, inner = module.split(".", 3)
            own = f"blk.{number}.{GPT2[inner]}"
        turned = tensor.mT if "c_" in module and leaf == "weight" else tensor
        _add(writer, f"{own}.{leaf}", turned, kind)
    return _written(writer, path)


def save_falcon(model: Any, path: Path) -> Path:
    """Save a Falcon in float32, without what llama.cpp does to several heads of keys."""
    config = model.config
    writer = gguf.GGUFWriter(path, "falcon")
    _add_sizes(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.FALCON, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            _add(writer, names.get_name(name, (".weight", ".bias")), tensor, "F32")
    return _written(writer, path)


def _add_sizes(writer: Any, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    of_a_head = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(getattr(config, "head_dim", None) or of_a_head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of q and k as llama.cpp's rotary embedding wants them: both halves of a head by turns."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _add(writer: Any, name: str, tensor: Tensor, kind: str) -> None:
    values = tensor.detach().float().contiguous().numpy()
    numbered = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[numbered]
    if tensor.ndim < 2 or tensor.shape[-1] % block:
        writer.add_tensor(name, values)
        return
    try:
        packed = gguf.quantize(values, numbered)
    except NotImplementedError:
        packed = random_blocks(values.shape, numbered)
    writer.add_tensor(name, packed, raw_dtype=numbered)


def random_blocks(shape: tuple[int, ...], kind: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks of a type that gguf cannot make: any bits that stand for finite numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    while True:
        found = generator.integers(0, 64, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
        if np.isfinite(gguf.dequantize(found, kind)).all():
            return found


def _written(writer: Any, path: Path) -> Path:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
