#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter of two (IA)³ adapters that change nothing doubles what their layers give.
#
# Expected: the base again, as a sum of two LoRA adapters that change nothing is the base.
# Seen: the vectors are factors, 1 where nothing was learnt, and they are added with their weights: two
#   of weight 1 make 2 of every 1, and one adapter of weight 0.5 halves its layers.
# So: give (IA)³ adapters weights that sum to 1, or merge their updates, W·(l − 1).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy
from tiny_llama import base, logits

from peft import IA3Config, get_peft_model
config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
model = get_peft_model(copy.deepcopy(base), config, adapter_name="a")
model.add_adapter("b", config)
layer = model.base_model.model.model.layers[0].self_attn.k_proj
right = logits(base)
def apart(name):
    model.set_adapter(name)
    return round(float((logits(model) - right).norm() / right.norm()), 3)
model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "both")
model.add_weighted_adapter(["a"], [0.5], "halved")
factors = {name: sorted(set(own.flatten().tolist())) for name, own in layer.ia3_l.items()}
print("factors:", factors, "logits beside the base's:", {name: apart(name) for name in factors})
assert factors == {"a": [1.0], "b": [1.0], "both": [2.0], "halved": [0.5]}, factors
assert apart("a") == 0 and apart("both") > 0.1 and apart("halved") > 0.1
PY
