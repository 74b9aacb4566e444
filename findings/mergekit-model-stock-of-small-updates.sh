#!/usr/bin/env bash
# mergekit 0.1.5: model_stock gives the base where updates are shorter than 0.001, be the experts equal or not.
#
# Expected: of two equal experts that expert, whatever the length of its update: the method goes by an angle.
# Seen: the product of two lengths counts as 1e-6 at least. Equal updates of length 1e-4 count as nearly at right
#   angles, and 2 % of the update is left; of 1e-5 nothing. Norms and biases after a short or careful training are so
#   short, and stay the base's.
# So: give such tensors linear by a filter, or look at the lengths first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.model_stock import model_stock_merge_method

torch.manual_seed(0)
base = torch.ones(64, dtype=torch.float64)
way = torch.nn.functional.normalize(torch.randn(64, dtype=torch.float64), dim=0)
seen = {}
for length in (1e-2, 1e-3, 1e-4, 1e-5):
    expert = base + length * way
    merged = model_stock_merge_method.merge_group(TensorGroup.from_tensors([base, expert, expert], base_index=0))
    seen[length] = float((merged - base).norm()) / length
print("of the update of two equal experts is kept, by its length:", seen)
assert seen[1e-2] > 0.99 and seen[1e-4] < 0.03 and seen[1e-5] < 1e-3, seen
PY
