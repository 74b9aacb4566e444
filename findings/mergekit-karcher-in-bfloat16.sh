#!/usr/bin/env bash
# mergekit 0.1.5: karcher of a bfloat16 model with itself is another model, off by half of a small update.
#
# Expected: the Karcher mean of two equal models is that model; in float32 it is.
# Seen: tensors become unit vectors, are turned, and get their length back, each step rounded to bfloat16. A change of
#   0.5 % of the weights is lost by more than half in that. slerp of the same tensors gives the model.
# So: dtype: float32 with out_dtype: bfloat16 wherever karcher is the method.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from mergekit.merge_methods.karcher import karcher_merge_tensors
from mergekit.merge_methods.slerp import slerp
torch.manual_seed(0)
base = 0.02 * torch.randn(256, 256)
expert = base + 0.0001 * torch.randn(256, 256)
off = {}
for dtype in (torch.float32, torch.bfloat16):
    own = expert.to(dtype)
    update = (own.double() - base.to(dtype).double()).norm()
    ways = {
        "karcher": karcher_merge_tensors([own, own.clone()], [0.5, 0.5]),
        "slerp": slerp(torch.tensor([0.5]), own[None], own[None])[0],
    }
    for way, found in ways.items():
        off[way, str(dtype)[6:]] = round(float((found.double() - own.double()).norm() / update), 4)
print("off from the one model, as a part of its update:", off)
assert off.pop(("karcher", "bfloat16")) > 0.3 and max(off.values()) < 0.01, off
PY
