#!/usr/bin/env bash
# mergekit 0.1.5: what arcee_fusion takes of a small update is chosen by rounding errors.
#
# Expected: the weights whose importance, |difference| x KL divergence of the softmax of their row, is largest.
# Seen: the divergence of two nearly equal rows is a sum that cancels. With updates of 0.0001 it is below what float32
#   resolves: it is negative for half of the rows, none of whose weights is taken then, however far they moved. Of the
#   weights that float32 or float64 choose, a seventh are the same. With updates of 0.01 nearly all are.
# So: use it for models that are far apart, or cast both to float64 first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from mergekit.merge_methods.arcee_fusion import DynamicThresholdFusion, _compute_importance
torch.manual_seed(0)
base = 0.02 * torch.randn(512, 512)
seen = {}
for size in (0.01, 0.0001):
    expert = base + size * torch.randn(512, 512)
    importance = {dtype: _compute_importance(expert.to(dtype), base.to(dtype)) for dtype in (torch.float32, torch.float64)}
    one, two = (DynamicThresholdFusion().compute_fusion_mask(own)[0].bool() for own in importance.values())
    shared = float((one & two).sum() / (one | two).sum())
    negative = {str(dtype)[6:]: float((own.sum(1) < 0).double().mean()) for dtype, own in importance.items()}
    seen[size] = shared, negative
    print(f"updates of {size}: {shared:.3f} of the chosen weights are the same, rows of negative importance: {negative}")
assert seen[0.01][0] > 0.9 and seen[0.01][1]["float32"] == 0
assert seen[0.0001][0] < 0.3 and seen[0.0001][1]["float32"] > 0.25 and seen[0.0001][1]["float64"] == 0
PY
