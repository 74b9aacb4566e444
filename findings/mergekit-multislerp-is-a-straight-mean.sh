#!/usr/bin/env bash
# mergekit 0.1.5: multislerp gives the weighted mean of directions, made long again: no step of it is on the sphere.
#
# Expected: of two models what slerp gives: with weights 0.25 and 0.75 three quarters of the angle between them.
# Seen: the tangents are taken at the direction of the weighted mean, and their sum with the same weights is zero by that, so
#   that the step from there is of rounding errors. Of two tensors at a right angle the result lies at 71.57 and not 67.5
#   degrees. With equal weights the two agree.
# So: slerp for two models, karcher for more, where angles are meant; else linear of directions says what it does.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import math

import torch
from mergekit.merge_methods.base import PerInputValues, TensorGroup
from mergekit.merge_methods.multislerp import multislerp
from mergekit.merge_methods.slerp import slerp

def merged(tensors, weights):
    return multislerp.merge_group(TensorGroup.from_tensors(tensors), weight=PerInputValues(list(enumerate(weights))))
one, other = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
seen = {}
for weight in (0.5, 0.75, 0.9):
    own = merged([one, other], [1 - weight, weight])
    theirs = slerp(torch.tensor([weight], dtype=torch.float64), one[None], other[None])[0]
    seen[weight] = [round(math.degrees(math.atan2(float(found[1]), float(found[0]))), 2) for found in (own, theirs)]
torch.manual_seed(0)
tensors, weights = list(torch.randn(5, 6, 8, dtype=torch.float64)), [0.1, 0.3, 0.2, 0.15, 0.25]
mean = sum(weight * tensor / tensor.norm() for weight, tensor in zip(weights, tensors))
straight = mean / mean.norm() * sum(weight * tensor.norm() for weight, tensor in zip(weights, tensors))
off = float((merged(tensors, weights) - straight).norm() / straight.norm())
print("degrees by the second's weight, of multislerp and slerp:", seen, "five tensors: off the straight mean by", off)
assert seen == {0.5: [45.0, 45.0], 0.75: [71.57, 67.5], 0.9: [83.66, 81.0]} and off < 1e-7, (seen, off)
PY
