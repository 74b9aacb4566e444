#!/usr/bin/env bash
# diffusers 0.42.1: EMAModel(decay=0.9999) has a decay of 0 in its first step and of 0.92 in its hundredth.
#
# Expected: with use_ema_warmup=False, its default, the decay that was given.
# Seen: the decay is the smaller of what was given and (1 + n) / (10 + n), and 0 first: after one step
#   nothing is left of the weights that it was made of. 0.9999 is reached after 89,990 steps, so that a short
#   fine-tune's average is its last tenth, whatever decay was given.
# So: pass min_decay=decay too. The first step still takes the model's weights whole.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 diffusers==0.42.1 accelerate==1.15.0
venv/bin/python - <<'PY'
import torch
from diffusers.training_utils import EMAModel


def run(**fields):
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    average = EMAModel(model.parameters(), decay=0.9999, **fields)
    model.weight.data.fill_(1.0)
    seen = {}
    for step in range(1, 101):
        average.step(model.parameters())
        seen[step] = (round(average.cur_decay_value, 4), float(average.shadow_params[0]))
    return seen


plain, least = run(), run(min_decay=0.9999)
print("decay and average of 0 followed by 1:", {step: plain[step] for step in (1, 2, 10, 100)}, "with min_decay:", least[2])
assert plain[1] == (0.0, 1.0) and plain[2][0] == 0.1818 and plain[100][0] == 0.9174
assert least[1] == (0.0, 1.0) and least[2][0] == 0.9999
probe = EMAModel(torch.nn.Linear(1, 1).parameters(), decay=0.9999)
assert probe.get_decay(89_990) < 0.9999 == probe.get_decay(89_992)
PY
