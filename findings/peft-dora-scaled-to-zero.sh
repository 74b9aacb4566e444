#!/usr/bin/env bash
# peft 0.21.2: a DoRA adapter under rescale_adapter_scale(model, 0) is not the base.
#
# Expected: nothing of the adapter at 0, as of a LoRA: the scale goes in a line from the base to the expert.
# Seen: only B·A is scaled. The trained magnitudes stay, and most of what this adapter does is there at 0. set_scale does the
#   same (diffusers' set_adapters calls it), and disable_adapter gives the base.
# So: disable_adapter for the base; between the two interpolate merged weights.
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
from peft import LoraConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from tiny_llama import base, logits, tuned

right, seen = logits(base), {}
for dora in (False, True):
    torch.manual_seed(1)
    model = tuned(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=dora)))
    whole = (logits(model) - right).norm()
    with rescale_adapter_scale(model, 0.0):
        left = [logits(model)]
    with model.disable_adapter():
        left.append(logits(model))
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.0)
    left.append(logits(model))
    seen["DoRA" if dora else "LoRA"] = [round(float((found - right).norm() / whole), 3) for found in left]
print("what is left of the adapter, at scale 0, disabled, with set_scale 0:", seen)
assert seen["LoRA"] == [0, 0, 0] and seen["DoRA"][1] == 0 and min(seen["DoRA"][0], seen["DoRA"][2]) > 0.2, seen
PY
