#!/usr/bin/env bash
# peft 0.21.2: B·A of a saved PiSSA adapter is not its update of the base.
#
# Expected: W = W₀ + (alpha/r)·B·A, as of every LoRA file.
# Seen: the adapter was trained beside a base from which the leading singular parts were taken. PEFT
#   takes them away again when it loads the file; by the formula the weights are off by far more
#   than the training changed.
# So: convert it when it is saved (save_pretrained with path_initial_model_for_weight_conversion),
#   which writes twice the rank.
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

import json
from safetensors.torch import load_file
from peft import LoraConfig, get_peft_model
model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, lora_alpha=4, init_lora_weights="pissa", target_modules=["q_proj"]))
tuned(model, 1e-3)
model.save_pretrained("adapter")
merged = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight.detach()
before = base.model.layers[0].self_attn.q_proj.weight.detach()
file = load_file("adapter/adapter_model.safetensors")
key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
formula = before + file[key.format("B")] @ file[key.format("A")]
trained, error = float((merged - before).norm()), float((formula - merged).norm())
print("training changed the weights by", trained, "and the formula is off by", error)
assert json.load(open("adapter/adapter_config.json"))["init_lora_weights"] == "pissa"
assert error > 5 * trained
PY
