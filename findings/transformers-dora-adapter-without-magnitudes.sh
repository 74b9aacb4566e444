#!/usr/bin/env bash
# transformers 5.23.0: from_pretrained and load_adapter of a DoRA adapter leave its magnitudes out; PeftModel reads them.
#
# Expected: AutoModelForCausalLM.from_pretrained(adapter) is the model that PEFT trained, as it is for LoRA, and as it
#   was with transformers 4.57.1.
# Seen: A and B are loaded. The file has "lora_magnitude_vector" and the module wants "lora_magnitude_vector.weight",
#   so the magnitudes stay those of an untrained adapter; a table in the log has one row for each.
# So: load DoRA adapters by PeftModel.from_pretrained or AutoPeftModelForCausalLM.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_llama import AutoModelForCausalLM, base, logits, off, tuned

base.save_pretrained("base")
def fresh():
    return AutoModelForCausalLM.from_pretrained("base")
seen = {}
for dora in (False, True):
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, use_dora=dora, task_type="CAUSAL_LM")
    model = tuned(get_peft_model(fresh(), config))
    right = logits(model)
    model.save_pretrained("adapter")
    loaded = fresh()
    loaded.load_adapter("adapter")
    seen["DoRA" if dora else "LoRA"] = {
        "PeftModel": round(off(logits(PeftModel.from_pretrained(fresh(), "adapter")), right), 3),
        "from_pretrained": round(off(logits(AutoModelForCausalLM.from_pretrained("adapter")), right), 3),
        "load_adapter": round(off(logits(loaded), right), 3),
    }
print("off from the trained model:", seen)
assert max(seen["LoRA"].values()) == 0 and seen["DoRA"]["PeftModel"] == 0, seen
assert seen["DoRA"]["from_pretrained"] > 0.1 and seen["DoRA"]["load_adapter"] > 0.1, seen
PY
