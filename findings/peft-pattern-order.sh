#!/usr/bin/env bash
# peft 0.21.2: an adapter with alpha_pattern is another adapter after it was saved.
#
# Expected: the same scales before and after save_pretrained.
# Seen: the first pattern that matches counts, in the order of the dictionary, and
#   adapter_config.json is written with sorted keys. Here layer 1 has alpha 8 as it is trained and
#   64 as it is loaded.
# So: patterns that match the same module need an order that sorting keeps, or patterns that do not
#   overlap.
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

from peft import LoraConfig, PeftModel, get_peft_model
patterns = {"q_proj": 8, "layers.1.self_attn.q_proj": 64}
model = tuned(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj"], alpha_pattern=patterns)))
model.save_pretrained("adapter")
again = PeftModel.from_pretrained(copy.deepcopy(base), "adapter")
def scale(m):
    return m.base_model.model.model.layers[1].self_attn.q_proj.scaling["default"]
print("scale of layer 1 when trained", scale(model), "when loaded", scale(again), "outputs off by", off(logits(again), logits(model)))
assert (scale(model), scale(again)) == (2.0, 16.0)
PY
