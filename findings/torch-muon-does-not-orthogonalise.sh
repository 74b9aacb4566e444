#!/usr/bin/env bash
# torch 2.13.0: Muon's orthogonaliser gives an orthogonal matrix back with singular values that depend on its width.
#
# Expected: an orthogonal matrix is its own polar factor, at each width.
# Seen: its five steps do not converge: of orthogonal matrices of 64 rows the singular values become
#   0.68 to 0.69, of 256 rows 1.05 to 1.09. A step is half as long again in the wider layer.
# So: for a polar factor in a merge take coefficients that converge to 1, or a singular value
#   decomposition.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from torch.optim import Muon
torch.manual_seed(0)
seen = {}
for width in (64, 256):
    weight = torch.nn.Parameter(torch.zeros(width, width))
    weight.grad = torch.linalg.qr(torch.randn(width, width)).Q
    Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    values = torch.linalg.svdvals(weight.detach())
    seen[width] = (float(values.min()), float(values.max()))
print("singular values of the step, by width:", seen)
assert seen[64][1] < 0.75 and seen[256][0] > 1.0, seen
PY
