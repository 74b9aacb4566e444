#!/usr/bin/env bash
# torch 2.13.0: AveragedModel averages parameters and keeps the buffers of the model it was made of.
#
# Expected: running means and variances that belong to the averaged weights, or an error without
#   them.
# Seen: with the default use_buffers=False the weights are the mean of two models and running_mean
#   is the last model's.
# So: use_buffers=True, or update_bn with data; without either a network with batch normalisation is
#   not the average.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from torch.optim.swa_utils import AveragedModel
def net(value):
    norm = torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        norm.weight.fill_(value)
        norm.running_mean.fill_(value)
    return norm
average = AveragedModel(net(1.0))
for value in (1.0, 5.0):
    average.update_parameters(net(value))
weight, running = float(average.module.weight.detach()[0]), float(average.module.running_mean[0])
print("weight", weight, "running mean", running)
assert (weight, running) == (3.0, 5.0), (weight, running)
PY
