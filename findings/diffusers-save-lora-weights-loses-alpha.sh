#!/usr/bin/env bash
# diffusers 0.42.1: an adapter that save_lora_weights wrote comes back with alpha = rank.
#
# Expected: the scale alpha / r of the adapter that was trained.
# Seen: the file has the two factors and no alpha, unless unet_lora_adapter_metadata is passed
#   too; with r = 4 and alpha = 16 the loaded update is a quarter. save_lora_adapter of the model
#   does keep it.
# So: pass the metadata, or train with alpha = r.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 diffusers==0.42.1 accelerate==1.15.0
venv/bin/python - <<'PY'
import copy
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
torch.manual_seed(0)
base = UNet2DConditionModel(
    sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
trained = copy.deepcopy(base)
trained.add_adapter(LoraConfig(r=4, lora_alpha=16, target_modules=["to_q", "to_v"], init_lora_weights=False))
StableDiffusionPipeline.save_lora_weights("pipeline", unet_lora_layers=get_peft_model_state_dict(trained))
trained.save_lora_adapter("model")
seen = {}
for folder, prefix in (("pipeline", "unet"), ("model", None)):
    loaded = copy.deepcopy(base)
    loaded.load_lora_adapter(folder, prefix=prefix, weight_name="pytorch_lora_weights.safetensors")
    seen[folder] = {scale for module in loaded.modules() for scale in getattr(module, "scaling", {}).values()}
print("alpha / r of 16 / 4 comes back as", seen)
assert seen == {"pipeline": {1.0}, "model": {4.0}}, seen
PY
