#!/usr/bin/env bash
# torch 2.13.0: AveragedModel's EMA of a bfloat16 model hardly moves.
#
# Expected: an average in float32, or an error: the decay is 0.999 and bfloat16 has 8 bits.
# Seen: after 1,000 steps beside weights that moved by 0.1 the average has moved by a tenth of what
#   it should: most steps are below half of the last bit and are rounded away.
# So: average a float32 copy.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).bfloat16()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
average.update_parameters(model)
before = average.module.weight.detach().double()
with torch.no_grad():
    model.weight += 0.1
for _ in range(1000):
    average.update_parameters(model)
moved = float((average.module.weight.detach().double() - before).mean())
should = float((model.weight.detach().double() - before).mean()) * (1 - 0.999**1000)
print("moved by", moved, "and should have by", should)
assert moved < 0.3 * should
PY
