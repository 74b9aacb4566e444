#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter leaves out the trained biases of adapters with lora_bias=True, and saves zeros for them.
#
# Expected: one adapter with weight 1 is that adapter, as it is without lora_bias.
# Seen: with every combination_type the factors are combined, the bias of B in the new adapter stays zero, and its
#   config still says lora_bias=True: the saved file looks whole.
# So: merge_and_unload each adapter and combine weights and biases, or add up lora_B.*.bias by hand.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy

from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_llama import base, config, logits, off, tuned

config.attention_bias = True
start = type(base)(config).eval()
seen = {}
for bias in (False, True):
    for way in ("linear", "cat", "svd"):
        model = get_peft_model(copy.deepcopy(start), LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_bias=bias), "a")
        tuned(model)
        right = logits(model)
        model.add_weighted_adapter(["a"], [1.0], "same", combination_type=way)
        model.set_adapter("same")
        seen[bias, way] = round(off(logits(model), right, start), 3)
model.save_pretrained("out", selected_adapters=["same"])
biases = {float(own.abs().max()) for name, own in load_file("out/same/adapter_model.safetensors").items() if name.endswith("bias")}
print("off from the one adapter:", seen, "biases stored:", biases)
assert biases == {0.0} and model.peft_config["same"].lora_bias
for (bias, way), apart in seen.items():
    assert (apart > 0.1) if bias else (apart < 0.01), (bias, way, apart)
PY
