#!/usr/bin/env bash
# peft 0.21.2: a LoRA on torch's MultiheadAttention moves the bfloat16 weights of its base at every forward pass.
#
# Expected: that evaluating a model changes none of its weights.
# Seen: each pass adds the update to the base's weight and takes it off again, and each rounds. After 200
#   passes in eval mode without gradients the base is some thousandths away, and the same input gives
#   another output. In float32 it stays within rounding.
# So: run such adapters in float32, or merge them once, and take the base's weights from its own file.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import warnings

import torch
from peft import LoraConfig, get_peft_model
warnings.filterwarnings("ignore")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, tokens):
        return self.attn(tokens, tokens, tokens)[0]


def apart(found, right):
    return float((found.float() - right.float()).norm() / right.float().norm())


@torch.no_grad()
def moved(dtype):
    torch.manual_seed(0)
    model = Model().to(dtype)
    before = model.attn.in_proj_weight.clone()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["attn"], init_lora_weights=False)).eval()
    tokens = torch.randn(2, 5, 32, dtype=dtype)
    first = model(tokens)
    for _ in range(199):
        last = model(tokens)
    return apart(model.base_model.model.attn.base_layer.in_proj_weight, before), apart(last, first)


seen = {dtype: moved(dtype) for dtype in (torch.float32, torch.bfloat16)}
print("base and output after 200 passes, from what they were:", {str(k): [f"{x:.0e}" for x in v] for k, v in seen.items()})
assert max(seen[torch.float32]) < 1e-5 and min(seen[torch.bfloat16]) > 5e-4, seen
PY
