#!/usr/bin/env bash
# peft 0.21.2: what add_weighted_adapter makes of an adapter with rank_pattern is saved and cannot be loaded.
#
# Expected: the combined adapter comes back as it was.
# Seen: in memory it is right. Its configuration has the largest rank for all layers and no rank_pattern,
#   and the layers of smaller ranks keep theirs, so that the file does not fit its configuration: a size
#   mismatch, with linear, cat, svd and ties.
# So: before saving, write each layer's rank into both rank_pattern and alpha_pattern of
#   model.peft_config[name]: the scale of the combined adapter is 1 everywhere.
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
config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 8})
model = tuned(get_peft_model(copy.deepcopy(base), config, adapter_name="a"))
right = logits(model)
for how in ("linear", "cat", "svd", "ties"):
    model.add_weighted_adapter(["a"], [1.0], how, combination_type=how, **({"density": 1.0} if how == "ties" else {}))
    model.set_adapter(how)
    assert off(logits(model), right) < 1e-3, how
    made = model.peft_config[how]
    assert made.r == 8 and not made.rank_pattern, made
    model.save_pretrained("out", selected_adapters=[how])
    try:
        PeftModel.from_pretrained(copy.deepcopy(base), f"out/{how}")
    except RuntimeError as error:
        print(how, "is right in memory; loaded:", str(error).split("\n")[1].strip())
        assert "size mismatch" in str(error)
    else:
        raise SystemExit(f"{how} is loaded now")
    made.rank_pattern, made.alpha_pattern = {"q_proj": 8, "v_proj": 4}, {"q_proj": 8, "v_proj": 4}
    model.save_pretrained("mended", selected_adapters=[how])
    assert off(logits(PeftModel.from_pretrained(copy.deepcopy(base), f"mended/{how}")), right) < 1e-3, how
PY
