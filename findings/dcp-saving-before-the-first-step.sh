#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint's get_state_dict of an optimizer that has not stepped yet changes the training after it.
#
# Expected: reading a state changes nothing: a run that stores its start trains as one that does not.
# Seen: an optimizer without a state is made to step once, with gradients of zero and a learning rate of zero, and keeps what it got.
#   Adam and AdamW have step = 1 then, and their correction of the averages is that of a second step: the first true step is a
#   quarter shorter. SGD with dampening and momentum 0.9 loses nine tenths of it, because its buffer does not start from a gradient.
# So: store the model alone before the first step, or make the optimizer anew after storing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python -W ignore - <<'PY'
import copy
from functools import partial

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

torch.manual_seed(0)
start, rows = torch.nn.Linear(4, 4), torch.randn(8, 4)
def moved(make, read):
    model = copy.deepcopy(start)
    optimizer = make(model.parameters())
    if read:
        get_state_dict(model, optimizer)
    steps = [float(own["step"]) for own in optimizer.state.values() if "step" in own]
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
    return float((model.weight - start.weight).detach().abs().mean()), steps
optimizers = {
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "SGD with dampening": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.9),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
seen = {}
for name, make in optimizers.items():
    (alone, none), (after, steps) = moved(make, read=False), moved(make, read=True)
    assert none == [] and set(steps) <= {1.0}, (none, steps)
    seen[name] = round(after / alone, 3)
print("length of the first step after get_state_dict, beside that of an untouched run:", seen)
assert 0.74 < seen["Adam"] < 0.75 and 0.74 < seen["AdamW"] < 0.75, seen
assert seen["SGD with dampening"] == 0.1 and seen["SGD"] == 1, seen
PY
