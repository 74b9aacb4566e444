#!/usr/bin/env bash
# peft 0.21.2: merge_and_unload of an adapter with layer_replication gives another model, and says nothing.
#
# Expected: the merged model gives what the adapter gives, or merging is refused.
# Seen: the copies of a layer share one weight, so each copy's update is added to it, and all
#   copies have all updates. safe_merge=True does the same.
# So: make the stacked model first, with weights of its own for each layer, and merge the adapter
#   into that.
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
from tiny_llama import base, logits, torch
seen = {}
for replicated in (None, [[0, 2], [0, 2]]):
    for safe in (False, True):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], layer_replication=replicated)
        adapted = get_peft_model(copy.deepcopy(base), config)
        start = logits(adapted)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.1 * torch.randn_like(parameter)
        right = logits(adapted)
        found = logits(adapted.merge_and_unload(safe_merge=safe))
        seen[bool(replicated), safe] = float((found - right).norm() / (right - start).norm())
print("merged, off by this share of what the adapter does (replicated, safe_merge):", seen)
assert all(value > 0.1 if replicated else value < 1e-4 for (replicated, _), value in seen.items()), seen
PY
