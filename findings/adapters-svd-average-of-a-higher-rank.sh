#!/usr/bin/env bash
# adapters 1.3.0: average_adapter by SVD with a rank twice that of its adapters gives half of their average.
#
# Expected: with svd_rank = 2r two adapters of rank r are averaged without loss.
# Seen: the direction is exact and the length is r / svd_rank of it. B·A is split anew, and the new adapter has the old
#   alpha with the new rank: alpha / r of 2 became 1. A rank below r makes the adapter too long in the same way.
# So: keep svd_rank = r, or multiply the weights (with normalize_weights=False) by svd_rank / r.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 adapters==1.3.0 transformers==4.57.6
venv/bin/python - <<'PY'
import adapters
import torch
from tiny_llama import base

adapters.init(base)
config = adapters.LoRAConfig(r=4, alpha=8, attn_matrices=["q", "v"])
for name in "ab":
    base.add_adapter(name, config=config)
for name, parameter in base.named_parameters():
    if "loras." in name:
        torch.nn.init.normal_(parameter)
def update(name):
    own = base.model.layers[0].self_attn.q_proj.loras[name]
    return (own.scaling * own.lora_B @ own.lora_A).detach()
right = (update("a") + update("b")) / 2
seen = {}
for rank in (4, 8, 16):
    name = f"rank {rank}"
    base.average_adapter(name, ["a", "b"], weights=[0.5, 0.5], combine_strategy="lora_delta_w_svd", svd_rank=rank)
    found = update(name)
    length = float(found.norm() / right.norm())
    seen[rank] = round(length, 3), round(float((found * right).sum() / found.norm() / right.norm()), 3)
print("length beside the average's, and cosine with it:", seen)
assert seen[8] == (0.5, 1.0) and seen[16] == (0.25, 1.0) and seen[4][0] > 0.8, seen
PY
