#!/usr/bin/env bash
# peft 0.21.2: merge_and_unload(adapter_names=["b"]) merges b's LoRA and keeps the head of the active adapter a.
#
# Expected: the model that b is, with the head that was trained beside b (modules_to_save).
# Seen: b's update lies in the layers, and the head is a's, as a is active. No order of names changes it.
# So: set_adapter("b") first; merge_and_unload then takes b for both.
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
from tiny_llama import base, tuned

from peft import LoraConfig, get_peft_model
config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
model = get_peft_model(copy.deepcopy(base), config, adapter_name="a")
model.add_adapter("b", config)
tuned(model)
heads = {name: own.weight.detach().clone() for name, own in model.base_model.model.lm_head.modules_to_save.items()}
layer = model.base_model.model.model.layers[0].self_attn.q_proj
right = layer.base_layer.weight + layer.get_delta_weight("b")
def merged(names, active=None):
    own = copy.deepcopy(model)
    if active is not None:
        own.set_adapter(active)
    own = own.merge_and_unload(adapter_names=names)
    weight = own.model.layers[0].self_attn.q_proj.weight
    head = next(name for name, tensor in heads.items() if torch.equal(tensor, own.lm_head.weight))
    return torch.allclose(weight, right, atol=1e-6), head
print("b's update, whose head: b merged:", merged(["b"]), "b set active and merged:", merged(["b"], "b"))
assert merged(["b"]) == (True, "a") and merged(["b", "a"])[1] == "a"
assert merged(["b"], "b") == (True, "b")
PY
