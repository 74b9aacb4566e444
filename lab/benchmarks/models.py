"""Random models of real shapes, which the benchmarks merge from disk."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import save_file

WORK = Path(__file__).parent / "work"

# TinyLlama-1.1B.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 22,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "dtype": "float32",
}


def apart(function, *arguments):
    """Call it in a process of its own: a child inherits its parent's peak memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def checkpoints(config: dict, experts: int, *, layers: int | None = None) -> list[Path]:
    """Folders of a base and its experts, written unless they are there."""
    depth = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
    config = {**config, depth: layers or config[depth]}
    folder = WORK / f"{config['model_type']}-{config[depth]}x{experts}"
    return apart(_write_checkpoints, folder, config, experts)


def _write_checkpoints(folder: Path, config: dict, experts: int) -> list[Path]:
    """Write a random base and experts whose updates differ sixfold in norm, as transformers does."""
    marker = folder / "complete.json"
    paths = [folder / name for name in ("base", *(f"expert{t}" for t in range(1, experts + 1)))]
    if marker.exists() and json.loads(marker.read_text()) == config:
        return paths
    shutil.rmtree(folder, ignore_errors=True)
    shapes = gpt2_shapes(config) if config["model_type"] == "gpt2" else llama_shapes(config)
    for number, path in enumerate(paths):
        tensors = {}
        # The base is drawn again for each expert, so that there is never a second model in memory.
        base, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(number)
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=base).mul_(0.02)
            if len(shape) == 1 and name.endswith("weight"):  # norms
                weight.add_(1)
            if number:
                scale = 4e-4 * 6 ** ((number - 1) / (experts - 1))
                weight.add_(torch.randn(shape, generator=own), alpha=scale)
            tensors[name] = weight.to(getattr(torch, config["dtype"]))
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config, indent=1))
        print(f"wrote {path}", file=sys.stderr)
    marker.write_text(json.dumps(config))
    return paths


def llama_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint."""
    d, ff = config["hidden_size"], config["intermediate_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": (d,),
            f"{prefix}mlp.down_proj.weight": (d, ff),
            f"{prefix}mlp.gate_proj.weight": (ff, d),
            f"{prefix}mlp.up_proj.weight": (ff, d),
            f"{prefix}post_attention_layernorm.weight": (d,),
            f"{prefix}self_attn.k_proj.weight": (kv, d),
            f"{prefix}self_attn.o_proj.weight": (d, d),
            f"{prefix}self_attn.q_proj.weight": (d, d),
            f"{prefix}self_attn.v_proj.weight": (kv, d),
        }
    return found | {"model.norm.weight": (d,), "lm_head.weight": (config["vocab_size"], d)}


def gpt2_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a GPT-2 checkpoint; weights are (in, out), and the head is tied."""
    d = config["n_embd"]
    layers = {"ln_1": (d,), "attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d)}
    layers |= {"ln_2": (d,), "mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}
    modules = {
        f"h.{block}.{name}": shape
        for block in range(config["n_layer"])
        for name, shape in layers.items()
    }
    found = {"wte.weight": (config["vocab_size"], d), "wpe.weight": (config["n_positions"], d)}
    for name, shape in {**modules, "ln_f": (d,)}.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    return {f"transformer.{name}": shape for name, shape in found.items()}
