#!/usr/bin/env bash
# diffusers 0.42.1: a UNet that is saved after fuse_lora loads with new random weights in every layer that had a LoRA.
#
# Expected: the fused model, which is what fusing is for.
# Seen: the layers are still wrapped, and are stored as to_q.base_layer.weight beside to_q.lora_A and lora_B:
#   from_pretrained names them in a warning and makes to_q.weight anew.
# So: after fuse_lora call pipe.unload_lora_weights() (unet.unload_lora()), which keeps what was fused, and save then.
#   In a folder that was saved before, .base_layer.weight is the fused weight.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 diffusers==0.42.1 accelerate==1.15.0
venv/bin/python - <<'PY'
import diffusers
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from safetensors.torch import load_file

diffusers.logging.set_verbosity_error()
torch.manual_seed(0)
model = UNet2DConditionModel(
    sample_size=8,
    block_out_channels=(32, 64),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=16,
    attention_head_dim=8,
    norm_num_groups=8,
)
model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
model.fuse_lora()
model.save_pretrained("fused")
names = [name for name in load_file("fused/diffusion_pytorch_model.safetensors") if "to_q" in name]
print("stored:", sorted(name.split("to_q.")[1] for name in names)[:3])
_, told = UNet2DConditionModel.from_pretrained("fused", output_loading_info=True)
print("missing when loaded:", len(told["missing_keys"]), "such as", sorted(told["missing_keys"])[0])
assert told["missing_keys"] and all(name.endswith("to_q.weight") for name in told["missing_keys"])
model.unload_lora()
model.save_pretrained("unloaded")
_, told = UNet2DConditionModel.from_pretrained("unloaded", output_loading_info=True)
assert not told["missing_keys"], told
held, stored = load_file("unloaded/diffusion_pytorch_model.safetensors"), load_file("fused/diffusion_pytorch_model.safetensors")
assert all(torch.equal(held[name.replace("base_layer.", "")], stored[name]) for name in names if "base_layer.weight" in name)
PY
