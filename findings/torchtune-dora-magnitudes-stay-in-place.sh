#!/usr/bin/env bash
# torchtune 0.6.1 with torchao 0.10.0: a DoRA adapter that is written for PEFT has the magnitudes of q and k at other rows.
#
# Expected: the converted adapter is the one that was trained, as without DoRA.
# Seen: heads are stored in another order of rows, so that lora_B of q_proj and k_proj is permuted, and the magnitude, which
#   has a number for each row, is not. PEFT loads all of it: rows of q and k are made as long as their neighbours were.
# So: permute the magnitudes as lora_B is, or merge in torchtune and convert the weights.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 torchao==0.10.0 torchtune==0.6.1
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import torch
from torchtune.models.convert_weights import tune_to_hf, tune_to_peft_adapter_weights
from torchtune.modules.peft import get_merged_lora_ckpt

torch.manual_seed(0)
heads, width, rank, alpha = 4, 32, 2, 8
shape = {"num_heads": heads, "num_kv_heads": heads, "dim": width}
seen = {}
for dora in (False, True):
    for layer in ("q_proj", "v_proj"):
        name = f"layers.0.attn.{layer}"
        weight = torch.randn(width, width) * torch.linspace(0.5, 2, width)[:, None]
        adapter = {f"{name}.lora_a.weight": torch.randn(rank, width), f"{name}.lora_b.weight": torch.randn(width, rank)}
        if dora:
            adapter[f"{name}.magnitude"] = weight.norm(dim=1)  # what an adapter has before its first step
        merged = get_merged_lora_ckpt({f"{name}.weight": weight.clone(), **adapter}, rank, alpha)
        right = tune_to_hf(merged, **shape)[f"model.layers.0.self_attn.{layer}.weight"]
        base = tune_to_hf({f"{name}.weight": weight}, **shape)[f"model.layers.0.self_attn.{layer}.weight"]
        theirs = tune_to_peft_adapter_weights(dict(adapter), **shape)
        found = {key.rpartition(f"{layer}.")[2]: own for key, own in theirs.items()}
        # what PEFT computes of these files
        given = base + alpha / rank * found["lora_B.weight"] @ found["lora_A.weight"]
        if dora:
            given *= (found["lora_magnitude_vector"] / given.norm(dim=1))[:, None]
        seen["DoRA" if dora else "LoRA", layer] = round(float((given - right).norm() / (right - base).norm()), 3)
print("the converted adapter is off what was trained by, beside its update:", seen)
assert seen["LoRA", "q_proj"] == seen["LoRA", "v_proj"] == seen["DoRA", "v_proj"] == 0 and seen["DoRA", "q_proj"] > 0.1, seen
PY
! grep -qi "magnitude" said || { cat said; exit 1; }
