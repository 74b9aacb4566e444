#!/usr/bin/env bash
# mergekit 0.1.5: slerp with a tensor that is zero in one model gives 0.7071 of the other, not half.
#
# Expected: at t = 0.5 a plain mean where an angle has no meaning.
# Seen: √½ of the other model's tensor: the dot product of a zero vector is 0, which is taken for a
#   right angle.
# So: biases that are zero in one model come out 41 % too long; look at them, or give these tensors
#   linear.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from mergekit.merge_methods.slerp import slerp
other = torch.tensor([[3.0, 4.0]])  # the first axis is a batch of tensors
merged = slerp(torch.tensor([0.5]), torch.zeros_like(other), other)
print("slerp of 0 and [3, 4] at 0.5 is", merged.tolist())
assert abs(float(merged.norm()) / 5 - 0.5**0.5) < 1e-5
PY
