#!/usr/bin/env bash
# diffusers 0.42.1: fuse_qkv_projections and a LoRA on to_q, to_k and to_v: what is computed has next to nothing of the LoRA.
#
# Expected: the same output as without fusing, in whichever order the two are called.
# Seen: the fused matrix is made of the base's weights, and what an adapter adds to to_q, to_k and to_v is not read: most of
#   its effect is gone, and nothing is said. Only cross-attention's to_q still has it, and unfusing brings all of it back.
# So: merge the LoRA (fuse_lora, then unload_lora_weights) before the projections are fused.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 diffusers==0.42.1 accelerate==1.15.0
venv/bin/python - <<'PY'
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig

def fresh():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()
picture, text = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 16)
def given(model):
    with torch.no_grad():
        return model(picture, 5, text).sample
def adapted(model):
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))
base = given(fresh())
plain = fresh()
adapted(plain)
right = given(plain)
first, last = fresh(), fresh()
first.fuse_qkv_projections()
unmoved = float((given(first) - base).norm())
adapted(first)
adapted(last)
last.fuse_qkv_projections()
seen = {"fused, then LoRA": given(first), "LoRA, then fused": given(last)}
first.unfuse_qkv_projections()
seen["unfused again"] = given(first)
kept = {name: round(1 - float((found - right).norm() / (right - base).norm()), 2) for name, found in seen.items()}
print("the part of the LoRA's effect that is there:", kept, "and fusing alone moves the base's output by", unmoved)
assert unmoved < 1e-3 and kept["unfused again"] > 0.99 and max(list(kept.values())[:2]) < 0.5, kept
PY
