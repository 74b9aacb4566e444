#!/usr/bin/env bash
# torch 2.13.0: update_bn gives the mean of the batches' variances: 1 for data sorted by class, whose variance is 176.
#
# Expected: the mean and the variance of what flows through the layer, as fvcore's update_bn_stats gives them.
# Seen: each batch's mean and variance are averaged, whatever its size. What lies between batches is in no variance.
#   A last batch of 8 rows counts as much as one of 64. Averaged or merged models get their statistics so (SWA,
#   REPAIR), and each order of the data makes another model.
# So: shuffle the rows and drop a short last batch, or use fvcore.nn.precise_bn.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 fvcore==0.1.5.post20221221
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import warnings

import torch
from fvcore.nn.precise_bn import update_bn_stats
from torch.optim.swa_utils import update_bn

torch.manual_seed(0)
rows = torch.cat([torch.randn(count, 1) + middle for count, middle in ((512, -10), (512, 10), (8, 100))])
shuffled = rows[torch.randperm(len(rows))]
seen = {"rows": (rows.mean().item(), rows.var().item())}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for order, given in (("sorted", rows), ("shuffled", shuffled)):
        for library in ("torch", "fvcore"):
            layer = torch.nn.BatchNorm1d(1)
            model, batches = torch.nn.Sequential(layer).train(), given.split(64)
            update_bn(batches, model) if library == "torch" else update_bn_stats(model, batches, len(batches))
            seen[order, library] = layer.running_mean.item(), layer.running_var.item()
told = [str(one.message) for one in told if issubclass(one.category, UserWarning)]
print("mean and variance:", {key: tuple(round(own, 1) for own in two) for key, two in seen.items()}, "warnings:", told)
assert abs(seen["sorted", "torch"][0] - seen["rows"][0]) > 4 and seen["sorted", "torch"][1] < 2 and not told, seen
for order in ("sorted", "shuffled"):
    assert all(abs(a - b) < 1 for a, b in zip(seen[order, "fvcore"], seen["rows"])), seen
PY
