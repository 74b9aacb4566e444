#!/usr/bin/env bash
# optimum-quanto 0.2.7: a model that is quantised with activations=qint8 and was not calibrated rounds what its layers give to whole numbers.
#
# Expected: a scale from what a layer is given, or an error that asks for the Calibration context.
# Seen: every layer has a scale of 1 that freeze keeps and the state dict stores. What layers pass on is rounded to whole numbers
#   up to 127: all is lost of a layer whose outputs are below one half, and nothing is said. Calibrated it is off by 2 %.
# So: look for input_scale and output_scale of exactly 1 in a file of this library before its model is scored.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 optimum-quanto==0.2.7
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import copy

import torch
from optimum.quanto import Calibration, freeze, qint8, quantize

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).eval()
inputs = torch.randn(256, 64)
right = net(inputs).detach()
seen = {}
for name in ("weights alone", "calibrated", "not calibrated"):
    model = copy.deepcopy(net)
    quantize(model, weights=qint8, activations=None if name == "weights alone" else qint8)
    with torch.no_grad():
        if name == "calibrated":
            with Calibration():
                model(inputs)
        freeze(model)
        given = model(inputs)
    given = given.dequantize() if hasattr(given, "dequantize") else given
    seen[name] = round(float((given - right).norm() / right.norm()), 3)
    scales = {key: float(value) for key, value in model.state_dict().items() if key.endswith("put_scale")}
print("outputs are off by", seen, "and the stored scales of the last are", scales)
assert seen["weights alone"] < 0.02 and seen["calibrated"] < 0.05 and seen["not calibrated"] > 0.5, seen
assert set(scales.values()) == {1.0}, scales
PY
! grep -qi calibrat log || { cat log; exit 1; }
