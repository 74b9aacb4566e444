#!/usr/bin/env bash
# peft 0.21.2: an adapter with lm_head among its targets stores the base's whole head.
#
# Expected: two thin factors for each target.
# Seen: save_embedding_layers='auto' sees a target named lm_head, takes that for a change of the
#   vocabulary, and writes the base's unchanged weight too; no other target does that.
# So: pass save_embedding_layers=False to save_pretrained, or the file of a 7B model's adapter
#   grows by its head; a tool that takes each tensor for trained finds a full weight.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy
from safetensors.torch import load_file
from peft import LoraConfig, get_peft_model
from tiny_llama import base, torch
seen = {}
for targets in (["q_proj"], ["q_proj", "lm_head"]):
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=targets))
    for choice in ("auto", False):
        adapted.save_pretrained("adapter", save_embedding_layers=choice)
        stored = load_file("adapter/adapter_model.safetensors")
        whole = {name: tensor for name, tensor in stored.items() if "lora_" not in name}
        assert all(torch.equal(tensor, base.lm_head.weight) for tensor in whole.values())
        seen[targets[-1], choice] = list(whole)
print("stored beside the factors:", seen)
assert [len(names) for names in seen.values()] == [0, 0, 1, 0], seen
PY
