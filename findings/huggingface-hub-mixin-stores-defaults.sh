#!/usr/bin/env bash
# huggingface_hub 2.4.0: PyTorchModelHubMixin stores an argument's default where JSON cannot hold what was given.
#
# Expected: the value, or a refusal; at the least no entry, so that loading asks for it.
# Seen: a model made with ratio=numpy.float32(0.25) has "ratio": 1.0, its default, in config.json, and from_pretrained
#   makes another model of the same weights. An argument such as a torch.dtype is left out, and comes back as its default.
# So: give plain numbers (float(x), x.item()), and read config.json before the weights are shared.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 huggingface_hub==2.4.0
venv/bin/python - <<'PY'
import json
import warnings

import numpy as np
import torch
from huggingface_hub import PyTorchModelHubMixin

class Adapter(torch.nn.Module, PyTorchModelHubMixin):
    def __init__(self, width: int = 8, ratio: float = 1.0, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.down, self.ratio, self.dtype = torch.nn.Linear(4, width), ratio, dtype
    def forward(self, given):
        return self.ratio * self.down(given)
seen, given = {}, torch.ones(1, 4)
with warnings.catch_warnings(record=True) as told, torch.no_grad():
    warnings.simplefilter("always")
    for ratio in (0.25, np.float64(0.25), np.float32(0.25)):
        model = Adapter(ratio=ratio, dtype=torch.float16)
        model.save_pretrained("saved")
        found = Adapter.from_pretrained("saved")
        times = round(float((found(given) / model(given)).mean()), 3)
        seen[type(ratio).__name__] = json.load(open("saved/config.json"))["ratio"], times, found.dtype
told = [str(one.message) for one in told if issubclass(one.category, UserWarning)]
print("stored ratio, what the loaded model gives beside the saved one, its dtype:", seen, "warnings:", told)
assert seen["float"][:2] == seen["float64"][:2] == (0.25, 1.0), seen
assert seen["float32"] == (1.0, 4.0, torch.float32) and not told, seen
PY
