#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter(combination_type='linear') of two adapters is not the weighted sum of their updates.
#
# Expected: w₁Δ₁ + w₂Δ₂, as the name and the weights say.
# Seen: (√w₁B₁ + √w₂B₂)(√w₁A₁ + √w₂A₂): the cross terms B₁A₂ and B₂A₁ come in, here nearly as long
#   as the mean itself. 'cat' is exact; 'svd' without svd_rank keeps the larger rank of the two.
# So: combination_type='cat', or 'svd' with svd_rank the sum of the ranks.
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
make = lambda: LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
model = get_peft_model(copy.deepcopy(base), make(), adapter_name="a")
model.add_adapter("b", make())
tuned(model)
layer = model.base_model.model.model.layers[0].self_attn.q_proj
mean = (layer.get_delta_weight("a") + layer.get_delta_weight("b")) / 2
seen = {}
for how in ("linear", "cat", "svd"):
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], how, combination_type=how)
    seen[how] = float((layer.get_delta_weight(how) - mean).norm() / mean.norm())
print("distance from the mean of the updates:", seen)
assert seen["linear"] > 0.5 and seen["cat"] < 1e-6 and seen["svd"] > 0.2, seen
PY
