#!/usr/bin/env bash
# peft 0.21.2: load_adapter under a name that is taken reads the file's weights and not its configuration.
#
# Expected: the second adapter, as when it is loaded under a name of its own, or a refusal.
# Seen: the weights are the second's, alpha and the layers are the first's: another model, which is saved like this too.
#   Layers that only the second adapter has stand in a value that is returned, and no warning names them.
# So: delete_adapter(name) first, or give each adapter its own name.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy
import warnings

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from tiny_llama import base, logits, off, tuned

right = {}
for name, alpha, layers in (("first", 8, ["q_proj"]), ("alpha", 64, ["q_proj"]), ("layers", 8, ["q_proj", "v_proj"])):
    model = tuned(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, lora_alpha=alpha, target_modules=layers)))
    model.save_pretrained(name)
    right[name] = logits(model)
seen = {}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for name in ("alpha", "layers"):
        model = PeftModel.from_pretrained(copy.deepcopy(base), "first")
        model.load_adapter(name, adapter_name="default")
        model.save_pretrained(f"{name}-again")
        own = PeftModel.from_pretrained(copy.deepcopy(base), "first")
        own.load_adapter(name, adapter_name="second")
        own.set_adapter("second")
        seen[name] = round(off(logits(model), right[name]), 2), round(off(logits(own), right[name]), 5)
told = [str(one.message) for one in told if "adapter" in str(one.message).lower() or "missing" in str(one.message).lower()]
saved = PeftConfig.from_pretrained("alpha-again").lora_alpha
print("off by, under the taken name and under another:", seen, "saved alpha:", saved)
print("warnings:", told)
assert all(taken > 0.5 and other < 0.001 for taken, other in seen.values()) and not told, (seen, told)
assert saved == 8
PY
