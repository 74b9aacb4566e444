#!/usr/bin/env bash
# diffusers 0.42.1: one call with a LoRA scale of 0 resets the weight that set_adapters gave the adapter.
#
# Expected: "scale" in cross_attention_kwargs holds for its call, as it does for 0.1 and 2.
# Seen: the call itself gives the base's output. After it the adapter has weight 1 and not the 0.5 that was set, as a
#   factor of 0 cannot be divided out again and the weight is set to 1 instead.
# So: for the base's output call disable_lora() and enable_lora(), or call set_adapters again.
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
def given(**more):
    with torch.no_grad():
        return model(picture, 5, text, **more).sample
base = given()
model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False), "style")
whole = given()
seen = {}
for scale in (0.1, 2.0, 0.0):
    model.set_adapters(["style"], [0.5])
    half = given()
    during = given(cross_attention_kwargs={"scale": scale})
    after = given()
    seen[scale] = "0.5" if torch.allclose(after, half, atol=1e-5) else "1" if torch.equal(after, whole) else "?"
print("the adapter's weight after a call with scale:", seen, "the call with 0 gives the base:", torch.equal(during, base))
assert seen == {0.1: "0.5", 2.0: "0.5", 0.0: "1"} and torch.equal(during, base), seen
PY
