#!/usr/bin/env bash
# peft 0.21.2, transformers 5.23.0 and diffusers 0.42.1: after a second adapter is loaded the first is active in peft, the second in the others.
#
# Expected: one rule: the last two call the first's functions. PeftModel.load_adapter, model.load_adapter of transformers, and
#   load_lora_adapter of diffusers take the same folder and a name.
# Seen: the same two calls compute with another adapter each: peft goes on with the first, transformers and diffusers change to
#   the second and switch the first off. transformers also prints a report at each call, in which all weights of the base "were
#   newly initialized because missing": none was touched. A script that is moved from one to the other scores the other adapter.
# So: set_adapter (diffusers: set_adapters) after every load.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 diffusers==0.42.1 accelerate==1.15.0
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import copy

import torch
from diffusers import UNet2DConditionModel
from tiny_llama import base, logits, off, tuned

from peft import LoraConfig, PeftModel, get_peft_model

alone = {}
for name in ("first", "second"):
    tuned(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj"]))).save_pretrained(name)
    alone[name] = logits(PeftModel.from_pretrained(copy.deepcopy(base), name))
with_peft = PeftModel.from_pretrained(copy.deepcopy(base), "first", adapter_name="first")
with_peft.load_adapter("second", "second")
with_transformers = copy.deepcopy(base)
before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
for name in ("first", "second"):
    with_transformers.load_adapter(name, name)
seen = {"peft": off(logits(with_peft), alone["first"]), "transformers": off(logits(with_transformers), alone["second"])}
held = {name.replace(".base_layer", ""): tensor for name, tensor in with_transformers.state_dict().items()}
untouched = all(torch.equal(held[name], tensor) for name, tensor in before.items())

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=8, block_out_channels=(32, 64), layers_per_block=1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
)
for name in ("one", "two"):
    adapted = copy.deepcopy(unet)
    adapted.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
    adapted.save_lora_adapter(name)
for name in ("one", "two"):
    unet.load_lora_adapter(name, adapter_name=name, prefix=None, weight_name="pytorch_lora_weights.safetensors")
active = {"peft": with_peft.active_adapters, "transformers": with_transformers.active_adapters(), "diffusers": unet.active_adapters()}
print("active after both were loaded:", active, "off by", seen, "the base is untouched:", untouched)
assert active == {"peft": ["first"], "transformers": ["second"], "diffusers": ["two"]}, active
assert max(seen.values()) < 1e-4 and off(alone["first"], alone["second"]) > 0.5 and untouched, seen
PY
grep -q "newly initialized" log
