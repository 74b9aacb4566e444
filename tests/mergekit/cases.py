"""Recipes of mergekit and the models they merge; nothing here imports mergekit or covmerge.

`tests/mergekit/make_goldens.py` runs mergekit over them and keeps what it makes in
tests/golden/mergekit_recipes.safetensors; `test_parity.py` runs covmerge.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SEED = 42
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
}
EXPERTS = 3


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


def drawn(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, key)).encode()))


def weights(arch: str, model: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the base (`base`), or of an expert (`t0`, ...)."""
    found: dict[str, Tensor] = {}
    for name, shape in layout(arch):
        own = torch.randn(shape, generator=drawn(arch, name))
        if model != "base":
            number = int(model[1:]) + 1
            own += 0.05 * number * torch.randn(shape, generator=drawn(arch, model, name))
        found[name] = own.to(dtype).contiguous()
    return found


def save_models(folder: Path) -> None:
    """Write llama, gpt2 and the same llama in bfloat16, each with a base and experts, and two adapters."""
    for name, dtype in (("llama", "float32"), ("gpt2", "float32"), ("half", "bfloat16")):
        arch = "gpt2" if name == "gpt2" else "llama"
        config = {**CONFIGS[arch], "torch_dtype": dtype}
        for model in ("base", *(f"t{t}" for t in range(EXPERTS))):
            path = folder / name / model
            path.mkdir(parents=True)
            stored = weights(arch, model, getattr(torch, dtype))
            save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
            (path / "config.json").write_text(json.dumps(config))
    for t in range(2):
        _save_adapter(folder / "gpt2" / f"lora{t}", t)


def _save_adapter(path: Path, number: int) -> None:
    path.mkdir()
    tensors: dict[str, Tensor] = {}
    for i in range(LAYERS):
        for module, columns in (("attn.c_attn", 24), ("mlp.c_fc", 32)):
            key = f"base_model.model.transformer.h.{i}.{module}."
            generator = drawn("lora", number, i, module)
            tensors[f"{key}lora_A.weight"] = 0.2 * torch.randn(2, 8, generator=generator)
            tensors[f"{key}lora_B.weight"] = 0.2 * torch.randn(columns, 2, generator=generator)
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


def _models(arch: str, *parameters: str) -> str:
    return "models:\n" + "".join(
        f"  - {{model: ./{arch}/t{t}, parameters: {{{own}}}}}\n" for t, own in enumerate(parameters)
    )


_THREE = ("weight: 0.5", "weight: 0.3", "weight: 0.2")
_DENSE = tuple(f"{own}, density: 0.{6 - t}" for t, own in enumerate(_THREE))
_OVER = "base_model: ./{arch}/base\n"


def _over(arch: str, method: str, models: str, *more: str) -> str:
    return "\n".join((f"merge_method: {method}", _OVER.format(arch=arch) + models, *more))


RECIPES: dict[str, str] = {
    "linear": "merge_method: linear\n" + _models("gpt2", *["weight: 1.0"] * 3),
    "linear_over_a_base_that_is_listed": """
merge_method: linear
base_model: ./llama/base
models:
  - {model: ./llama/t1, parameters: {weight: [0, 0.5, 1]}}
  - {model: ./llama/base, parameters: {weight: 0.4}}
  - {model: ./llama/t0, parameters: {weight: [{filter: mlp, value: -0.2}, {value: 0.7}]}}
parameters: {normalize: false}
""",
    "task_arithmetic": _over(
        "gpt2",
        "task_arithmetic",
        _models("gpt2", *["weight: 1.0"] * 3),
        "parameters: {lambda: 0.3}",
    ),
    "ties_with_everything": """
merge_method: ties
base_model: ./llama/base
models:
  - model: ./llama/base
  - model: ./llama/t0
    parameters:
      weight: [0, 0.3, 0.7, 1]
      density: [{filter: self_attn, value: [0.2, 0.9]}, {filter: mlp, value: 0.5}, {value: 0.7}]
  - model: ./llama/t1
    parameters:
      weight: [{filter: down_proj, value: 1.0}]
  - model: ./llama/t2
parameters:
  weight: 0.25
  density: 0.4
  lambda: [{filter: layernorm, value: 0.0}, {value: 0.9}]
  normalize: true
  int8_mask: true
""",
    "ties_of_half_precision": _over("half", "ties", _models("half", *_DENSE)),
    "dare_ties": _over(
        "gpt2", "dare_ties", _models("gpt2", *_DENSE), "parameters: {int8_mask: true}"
    ),
    "dare_linear": _over("llama", "dare_linear", _models("llama", *_DENSE)),
    "della": _over(
        "llama",
        "della",
        _models("llama", *(f"{own}, epsilon: 0.1" for own in _DENSE)),
        "parameters: {lambda: 1.1, normalize: true}\ndtype: float32\nout_dtype: bfloat16",
    ),
    "breadcrumbs_ties": _over("llama", "breadcrumbs_ties", _models("llama", *_DENSE)),
    "slerp_gradient": """
slices:
  - sources:
      - {model: ./llama/t0, layer_range: [0, 4]}
      - {model: ./llama/t1, layer_range: [0, 4]}
merge_method: slerp
base_model: ./llama/t0
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
    - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
    - value: 0.5
dtype: float32
""",
    "passthrough_stack": """
slices:
  - sources: [{model: ./gpt2/t0, layer_range: [0, 3]}]
  - sources:
      - model: ./gpt2/t1
        layer_range: [1, 3]
        parameters: {scale: [{filter: c_proj, value: 0.0}, {value: 1.0}]}
  - sources: [{model: ./gpt2/t0, layer_range: [3, 4]}]
merge_method: passthrough
dtype: float16
""",
    "stack_of_means": """
slices:
  - sources:
      - {model: ./llama/t0, layer_range: [0, 2], parameters: {weight: [1, 0]}}
      - {model: ./llama/t1, layer_range: [1, 3], parameters: {weight: 0.5}}
    parameters: {normalize: true}
  - sources:
      - {model: ./llama/t2, layer_range: [1, 4]}
      - {model: ./llama/t0, layer_range: [0, 3], parameters: {weight: [0.1, 0.2, 0.9]}}
parameters: {weight: 0.3, normalize: false}
merge_method: linear
""",
    "stack_over_a_base": """
slices:
  - sources:
      - {model: ./llama/base, layer_range: [0, 3]}
      - {model: ./llama/t1, layer_range: [0, 3], parameters: {weight: [0.2, 0.8]}}
      - {model: ./llama/t0, layer_range: [1, 4], parameters: {weight: -0.1}}
  - sources:
      - {model: ./llama/t2, layer_range: [1, 4], parameters: {weight: 1.0}}
      - {model: ./llama/t1, layer_range: [1, 4], parameters: {weight: 0.5}}
      - {model: ./llama/base, layer_range: [1, 4]}
    parameters: {lambda: 0.5}
base_model: ./llama/base
merge_method: task_arithmetic
""",
    "model_stock": _over("gpt2", "model_stock", _models("gpt2", "", "", ""), "dtype: bfloat16"),
    "sce": _over(
        "llama",
        "sce",
        _models("llama", "", "", ""),
        "parameters: {select_topk: 0.2, int8_mask: true}",
    ),
    "nuslerp": "merge_method: nuslerp\n" + _models("llama", "weight: [0.1, 0.9]", "weight: 0.5"),
    "multislerp_over_a_base": _over("llama", "multislerp", _models("llama", *_THREE)),
    "karcher": "merge_method: karcher\n" + _models("gpt2", "", "", ""),
    "ram": _over("llama", "ram", _models("llama", "", "", ""), "parameters: {epsilon: 0.02}"),
    "lora_dare_linear": """
models:
  - {model: ./gpt2/base+./gpt2/lora0, parameters: {weight: 0.6, density: 0.7}}
  - {model: ./gpt2/base+./gpt2/lora1, parameters: {weight: 0.4, density: 0.7}}
merge_method: dare_linear
base_model: ./gpt2/base
dtype: float32
""",
}
