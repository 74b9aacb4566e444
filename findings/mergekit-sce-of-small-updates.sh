#!/usr/bin/env bash
# mergekit 0.1.5: sce weighs its experts alike as soon as their updates are as small as fine-tunes make them.
#
# Expected: weights by the energy of the updates, which is the C of the method, at any scale.
# Seen: where the mean squares add up to less than 1e-6 all weights are equal: an expert with a hundred times the
#   energy has 0.99 at a root mean square of 0.001, and 0.5 at 0.0005. Fine-tunes move weights by about that.
# So: multiply out the weights yourself and use linear or task_arithmetic, or expect an equal mean.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.sce import sce_merge

torch.manual_seed(0)
base = torch.zeros(64, 64, dtype=torch.float64)
loud = torch.rand(64, 64, dtype=torch.float64)
seen = {}
for size in (1e-1, 1e-2, 2e-3, 5e-4):
    update = size * loud / loud.square().mean().sqrt()
    merged = sce_merge.merge_group(TensorGroup.from_tensors([base, update, update / 10], base_index=0))
    # w of the loud one and 1 - w of the other, which has a tenth of it
    seen[size] = float(((merged / update).mean() - 0.1) / 0.9)
print("the weight of the louder expert, by the root mean square of its update:", seen)
assert seen[1e-1] > 0.98 and seen[2e-3] > 0.98 and abs(seen[5e-4] - 0.5) < 1e-6, seen
PY
