#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint loads float32 weights into an integer tensor without a word.
#
# Expected: an error where the dtype stored is another than the dtype asked for, as for a shape.
# Seen: the values are copied into the tensor that is there, and cast: to bfloat16, and to int32,
#   which leaves 0 of weights below 1.
# So: compare dtypes with the metadata (FileSystemReader.read_metadata) before dcp.load.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/python - <<'PY'
import torch
import torch.distributed.checkpoint as dcp
torch.manual_seed(0)
weight = torch.rand(1000)
dcp.save({"w": weight}, checkpoint_id="saved", no_dist=True)
seen = {}
for dtype in (torch.bfloat16, torch.int32):
    state = {"w": torch.ones(1000, dtype=dtype)}
    dcp.load(state, checkpoint_id="saved", no_dist=True)
    assert state["w"].dtype == dtype
    seen[dtype] = float((state["w"].double() - weight).norm() / weight.norm())
print("off after loading, by the dtype of the tensor that is there:", seen)
assert 0 < seen[torch.bfloat16] < 0.01 and seen[torch.int32] > 0.999, seen
PY
