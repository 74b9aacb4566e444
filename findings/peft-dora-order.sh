#!/usr/bin/env bash
# peft 0.21.2: two active DoRA adapters give other outputs in another order.
#
# Expected: set_adapter(['a', 'b']) and ['b', 'a'] are one model, as with LoRA.
# Seen: outputs differ by more than half of what the adapters do, unmerged and merged: each
#   adapter's magnitude is of a norm in which the ones before are not counted alike.
# So: an order belongs to a stack of DoRA adapters, or one at a time.
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
for dora in (False, True):
    make = lambda: LoraConfig(r=4, use_dora=dora, target_modules=["q_proj"])
    model = get_peft_model(copy.deepcopy(base), make(), adapter_name="a")
    model.add_adapter("b", make())
    tuned(model)
    outputs = []
    for order in (["a", "b"], ["b", "a"]):
        model.base_model.set_adapter(order)
        outputs.append(logits(model))
    seen["DoRA" if dora else "LoRA"] = off(outputs[1], outputs[0])
print("outputs in the other order are off by:", seen)
assert seen["LoRA"] < 1e-5 and seen["DoRA"] > 0.3, seen
PY
