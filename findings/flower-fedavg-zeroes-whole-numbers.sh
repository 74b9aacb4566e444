#!/usr/bin/env bash
# flwr 1.42.0: FedAvg of clients whose whole-number tensors are equal returns zeros; the newer one, some numbers less one.
#
# Expected: the average of equal numbers is that number; a Swin's relative_position_index is the same in all clients.
# Seen: flwr.server's FedAvg averages in place. Where the share of a client, 0.5, cannot be put into an integer array
#   it is cast to the array's dtype, which is 0: every index is 0, load_state_dict(strict=True) takes them, and each pair of patches
#   is given the bias of the same place. flwr.serverapp's FedAvg gives float64 numbers. Three times a third of 7 is 6.999...,
#   which load_state_dict cuts to 6: of three equal clients one index in ten is another place's.
# So: send and average floating-point tensors alone, and leave buffers of whole numbers where they are.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 torchvision==0.28.0 flwr==1.42.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import copy

import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from torchvision.models import swin_t

torch.manual_seed(0)
model = swin_t(num_classes=4).eval()
for parameter in model.parameters():
    parameter.data += 0.1 * torch.randn_like(parameter)
weights = model.state_dict()
answer = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([own.numpy() for own in weights.values()]), 100, {})
images = torch.randn(4, 3, 96, 96)
seen = {}
for inplace in (True, False):
    averaged, _ = FedAvg(inplace=inplace).aggregate_fit(1, [(None, copy.deepcopy(answer)), (None, copy.deepcopy(answer))], [])
    again = dict(zip(weights, map(torch.tensor, parameters_to_ndarrays(averaged)), strict=True))
    index = next(name for name in weights if name.endswith("relative_position_index"))
    other = swin_t(num_classes=4).eval()
    other.load_state_dict(again, strict=True)
    with torch.no_grad():
        off = float((other(images) - model(images)).norm() / model(images).norm())
    seen["in place" if inplace else "not in place"] = [int(weights[index].max()), float(again[index].max()), round(off, 3)]
replies = [
    RecordDict({"arrays": ArrayRecord(weights), "metrics": MetricRecord({"num-examples": share})}) for share in (100, 100, 100)
]
newer = aggregate_arrayrecords(replies, "num-examples").to_torch_state_dict()
other = swin_t(num_classes=4).eval()
other.load_state_dict(newer, strict=True)
moved = float((other.state_dict()[index] != weights[index]).float().mean())
with torch.no_grad():
    seen["newer"] = [round(moved, 2), round(float((other(images) - model(images)).norm() / model(images).norm()), 3)]
print("the largest index in each client, in their average, and how far off two equal clients' average is;"
    " of the newer FedAvg, the part of indices that are others, and how far off:", seen)
assert seen["in place"][:2] == [168, 0] and seen["in place"][2] > 0.02, seen
assert seen["not in place"] == [168, 168, 0], seen
assert seen["newer"][0] > 0.05 and seen["newer"][1] > 0.001, seen
PY
