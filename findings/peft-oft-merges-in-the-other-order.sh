#!/usr/bin/env bash
# peft 0.21.2: two active OFT adapters are merged in the opposite order of the one they compute in.
#
# Expected: that merge_and_unload of the active adapters a and b gives the model that it was called on. Rotations do not commute,
#   and BOFT, HRA and MiSS, whose order counts as well, keep theirs.
# Seen: the merged model is the one with b and a active in this order, exactly: its outputs are off by three tenths of what the
#   adapters do. With one adapter merged and unmerged are the same.
# So: merge_and_unload(adapter_names=["b", "a"]) for what ["a", "b"] computes, and compare outputs before the adapters go.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import copy

import torch
from tiny_llama import base, logits, off

from peft import BOFTConfig, HRAConfig, MissConfig, OFTConfig, PeftModel, get_peft_model

kinds = {
    "OFT": OFTConfig(oft_block_size=4, target_modules=["q_proj", "v_proj"]),
    "BOFT": BOFTConfig(boft_block_size=4, target_modules=["q_proj", "v_proj"]),
    "HRA": HRAConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "MiSS": MissConfig(r=4, target_modules=["q_proj", "v_proj"], init_weights="bat"),
}
seen = {}
for kind, settings in kinds.items():
    for seed, name in enumerate("ab"):
        model = get_peft_model(copy.deepcopy(base), copy.deepcopy(settings))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(f"{kind}-{name}")
    model = PeftModel.from_pretrained(copy.deepcopy(base), f"{kind}-a", adapter_name="a")
    model.load_adapter(f"{kind}-b", "b")
    alone = off(logits(copy.deepcopy(model).merge_and_unload()), logits(model))
    model.base_model.set_adapter(["b", "a"])
    other = logits(model)
    model.base_model.set_adapter(["a", "b"])
    right = logits(model)
    merged = logits(model.merge_and_unload())
    found = {"one": alone, "a, b": off(merged, right), "a, b beside b, a": off(merged, other, base), "orders": off(other, right)}
    seen[kind] = {name: round(number, 3) for name, number in found.items()}
print("merged outputs are off by, for one adapter, for a and b, beside those of b and a, and how far the orders are apart:", seen)
assert all(found["one"] < 0.01 and found["orders"] > 0.02 for found in seen.values()), seen
assert seen["OFT"]["a, b"] > 0.1 and seen["OFT"]["a, b beside b, a"] < 0.01, seen
assert all(seen[kind]["a, b"] < 0.01 for kind in ("BOFT", "HRA", "MiSS")), seen
PY
