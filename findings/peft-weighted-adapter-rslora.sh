#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter of one rsLoRA adapter with weight 1 is not that adapter.
#
# Expected: the adapter itself.
# Seen: an update √r times as long (twice, at rank 4), by linear, cat, svd and ties: the new adapter
#   has the other's scale in its weights, and is scaled as rsLoRA once more.
# So: merge rsLoRA adapters as updates, or set use_rslora to false with alpha multiplied by √r
#   before.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy
import torch
from tiny_llama import AutoModelForCausalLM, LlamaForCausalLM, base, config, logits, off, tuned

from peft import LoraConfig, get_peft_model
model = tuned(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj"]), adapter_name="a"))
layer = model.base_model.model.model.layers[0].self_attn.q_proj
length = layer.get_delta_weight("a").norm()
seen = {}
for how in ("linear", "cat", "svd", "ties"):
    model.add_weighted_adapter(["a"], [1.0], how, combination_type=how, **({"density": 1.0} if how == "ties" else {}))
    seen[how] = round(float(layer.get_delta_weight(how).norm() / length), 3)
print("length of the copy beside the original:", seen)
assert all(abs(v - 2) < 0.01 for v in seen.values()), seen
PY
