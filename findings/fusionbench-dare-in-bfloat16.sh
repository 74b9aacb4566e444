#!/usr/bin/env bash
# fusion-bench 0.2.33: DARE of a bfloat16 update with a sparsity of 0.995 or more gives the base.
#
# Expected: one weight in 200 is kept and multiplied by 200, so that the mean of the update stays.
# Seen: the random numbers for the mask have the update's dtype. bfloat16 has no number between 255/256 and 1, none
#   that is drawn is above 0.995, and nothing is kept, without a word. At 0.99 a quarter of the update is gone; float16
#   loses half of it at 0.999. In float32 all is as expected.
# So: load the models in float32 for DARE, or cast the task vector before it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 fusion-bench==0.2.33
venv/bin/python - <<'PY'
import torch
from fusion_bench.method.dare.utils import param_random_drop_
seen = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for sparsity in (0.9, 0.99, 0.995, 0.999):
        torch.manual_seed(0)
        update = torch.ones(1000, 1000, dtype=dtype)
        param_random_drop_(update, sparsity, rescale=True)
        seen[str(dtype)[6:], sparsity] = round(float(update.double().mean()), 3)
print("mean of an update of ones:", seen)
for (dtype, sparsity), mean in seen.items():
    if dtype == "float32":
        assert abs(mean - 1) < 0.15, (sparsity, mean)
assert seen["bfloat16", 0.995] == seen["bfloat16", 0.999] == 0
PY
