#!/usr/bin/env bash
# peft 0.21.2: a model whose adapter was swapped by hotswap_adapter saves the new factors with the old alpha.
#
# Expected: the adapter that was swapped in, since the model computes what that one does.
# Seen: in memory the scale is the new one's, and peft_config stays the old one's: saved and loaded the adapter has
#   the old alpha, and layers that only the old one had come back as well, as zeros.
# So: save the adapter that was swapped in from its own folder.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy
from tiny_llama import base, logits, off, tuned

from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter


def adapter(folder, alpha, *layers):
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=list(layers))
    model = tuned(get_peft_model(copy.deepcopy(base), config))
    model.save_pretrained(folder)
    return logits(model)


adapter("first", 8, "q_proj", "v_proj")
right = adapter("second", 32, "q_proj")
model = PeftModel.from_pretrained(copy.deepcopy(base), "first")
hotswap_adapter(model, "second", "default")
model.save_pretrained("swapped")
again = PeftModel.from_pretrained(copy.deepcopy(base), "swapped")
seen = {"swapped": off(logits(model), right), "saved and loaded": off(logits(again), right)}
print("outputs are off by", seen, "alpha:", again.peft_config["default"].lora_alpha)
assert seen["swapped"] < 1e-4 and seen["saved and loaded"] > 0.5, seen
assert again.peft_config["default"].lora_alpha == 8
PY
