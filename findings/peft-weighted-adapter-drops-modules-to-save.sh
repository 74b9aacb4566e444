#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter leaves out modules_to_save and DoRA's magnitudes.
#
# Expected: an error or the adapter itself, where one adapter is taken with weight 1.
# Seen: the trained head is gone and the base's takes its place; of a DoRA adapter the magnitudes
#   are gone. Nothing is said.
# So: look for modules_to_save and use_dora in adapter_config.json before adapters are combined this
#   way.
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
seen = {}
for name, more in {"modules_to_save": dict(modules_to_save=["lm_head"]), "DoRA": dict(use_dora=True)}.items():
    model = tuned(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], **more), adapter_name="a"))
    for key, parameter in model.named_parameters():
        if "magnitude" in key:
            parameter.data *= 1.5
    right = logits(model)
    model.add_weighted_adapter(["a"], [1.0], "copy", combination_type="cat")
    model.set_adapter("copy")
    seen[name] = off(logits(model), right)
print("outputs of the copy are off, beside what the adapter does:", seen)
assert all(v > 0.3 for v in seen.values()), seen
PY
