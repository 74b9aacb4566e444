#!/usr/bin/env bash
# torch 2.13.0: median of an even number of models is the lower of the two middle ones: of two models it is the smaller weight each time.
#
# Expected: the mean of the two in the middle, as numpy's median, and no direction that all weights move in.
# Seen: of four experts whose updates are symmetric around zero the median's is negative on the whole, by 0.3 of an update's
#   deviation; of two by more than half of one. All weights move down together, which a layer behind a norm adds up.
#   nanmedian does the same.
# So: sort along the models and take the mean of the middle two, or merge an odd number.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import numpy as np
import torch

torch.manual_seed(0)
base = 0.02 * torch.randn(512, 512)
inputs = torch.rand(64, 512)  # such as behind a ReLU
shift, moved = {}, {}
for count in (2, 3, 4, 5):
    experts = base + 0.001 * torch.randn(count, 512, 512)
    found = {"torch": experts.median(0).values, "numpy": torch.tensor(np.median(experts.numpy(), axis=0))}
    sorted_ = experts.sort(0).values
    found["middle"] = (sorted_[(count - 1) // 2] + sorted_[count // 2]) / 2
    assert torch.equal(found["torch"], experts.nanmedian(0).values)
    for name, own in found.items():
        update = own - base
        shift[f"{name} {count}"] = round(float(update.mean()) / 0.001, 2)
        moved[f"{name} {count}"] = round(float((inputs @ update.T).mean()), 3)
print("mean of the update, in deviations of one expert's:", shift)
print("mean of what it adds to an output:", moved)
assert shift["torch 2"] < -0.5 and -0.35 < shift["torch 4"] < -0.25, shift
assert all(abs(shift[f"{name} {count}"]) < 0.02 for name in ("numpy", "middle") for count in (2, 3, 4, 5)), shift
assert abs(shift["torch 3"]) < 0.02 and abs(shift["torch 5"]) < 0.02, shift
assert moved["torch 2"] < -0.1 and abs(moved["middle 2"]) < 0.01, moved
PY
