#!/usr/bin/env bash
# peft 0.21.2: merge_adapter of one of two active adapters silences the other.
#
# Expected: that the model gives the same before and after, as one adapter is merged and the other active.
# Seen: the other stays in the list of active adapters and adds nothing: a merged layer computes with its
#   weight alone.
# So: merge all active adapters at once, or none.
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

from peft import LoraConfig, get_peft_model
config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
model = get_peft_model(copy.deepcopy(base), config, adapter_name="a")
model.add_adapter("b", config)
tuned(model)
model.base_model.set_adapter(["a"])
one = logits(model)
model.base_model.set_adapter(["a", "b"])
both = logits(model)
model.merge_adapter(["a"])
active, found = model.base_model.active_adapters, logits(model)
print("active:", active, "from both:", round(off(found, both), 3), "from a alone:", f"{off(found, one):.0e}")
assert active == ["a", "b"] and off(found, both) > 0.1 and off(found, one) < 1e-3
model.unmerge_adapter()
model.merge_adapter(["a", "b"])
assert off(logits(model), both) < 1e-3
PY
