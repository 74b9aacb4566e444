"""Recipes of mergekit over the models of `models.py`; nothing here imports mergekit or covmerge.

`tests/mergekit/make_goldens.py` runs mergekit over them and keeps what it makes in
tests/golden/mergekit_recipes.safetensors; `test_parity.py` runs covmerge.
"""

from __future__ import annotations

SEED = 42


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
    "modules_dare_ties": """
merge_method: dare_ties
base_model: ./t5/base
modules:
  encoder:
    models:
      - {model: ./t5/t1, parameters: {weight: [0.2, 0.9], density: 0.3}}
      - {model: ./t5/t0, parameters: {weight: 0.7}}
    parameters: {lambda: 0.8}
  decoder: {models: [{model: ./t5/t2}, {model: ./t5/t0}], parameters: {weight: 0.4}}
  shared: {models: [{model: ./t5/t1}], parameters: {weight: 1.0}}
parameters: {density: 0.6, lambda: 1.1}
""",
    "modules_linear": """
merge_method: linear
modules:
  shared: {models: [{model: ./t5/t0}, {model: ./t5/t2}], parameters: {weight: 1}}
  encoder: {models: [{model: ./t5/t0}, {model: ./t5/t1, parameters: {weight: [0, 3]}}]}
  decoder: {models: [{model: ./t5/t2}]}
parameters: {weight: 0.5}
""",
}
