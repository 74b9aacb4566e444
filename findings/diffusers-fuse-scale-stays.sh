#!/usr/bin/env bash
# diffusers 0.42.1: after fuse_lora(lora_scale=0.5) and unfuse_lora, the adapter stays at half its scale.
#
# Expected: that the model is as it was before, and that the same call fuses the same again.
# Seen: the second fuse_lora(lora_scale=0.5) adds a quarter of the update. And set_adapters between
#   fusing and unfusing makes unfuse_lora take off the whole update where half was added, so that the
#   base is not the base.
# So: call set_adapters with the weights again after unfuse_lora, and never between the two.
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
torch.manual_seed(0)
model = UNet2DConditionModel(
    sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q"], init_lora_weights=False), "a")
layer = next(module for module in model.modules() if hasattr(module, "get_delta_weight"))
base, update = layer.base_layer.weight.detach().clone(), layer.get_delta_weight("a").detach()
def fused():
    return round(float(((layer.base_layer.weight.detach() - base) * update).sum() / update.square().sum()), 3)
seen = []
for _ in range(2):
    model.fuse_lora(lora_scale=0.5)
    seen.append(fused())
    model.unfuse_lora()
model.set_adapters(["a"], [1.0])
model.fuse_lora(lora_scale=0.5)
model.set_adapters(["a"], [1.0])
model.unfuse_lora()
seen.append(fused())
print("updates in the base: fused, fused again, unfused after set_adapters:", seen)
assert seen == [0.5, 0.25, -0.5], seen
PY
