#!/usr/bin/env bash
# torch 2.13.0: what torch.distributed.checkpoint raises is not caught by `except Exception`.
#
# Expected: an Exception.
# Seen: CheckpointException is a BaseException, beside KeyboardInterrupt. A missing key ends a
#   program that catches every Exception.
# So: catch CheckpointException by name.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import warnings
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
warnings.filterwarnings("ignore")
dcp.save({"a": torch.ones(2)}, checkpoint_id="folder")
caught = "nothing"
try:
    try:
        dcp.load({"b": torch.ones(2)}, checkpoint_id="folder")
    except Exception:
        caught = "Exception"
except CheckpointException:
    caught = "CheckpointException only"
print("a missing key is caught by", caught, "and its bases are", [c.__name__ for c in CheckpointException.__mro__])
assert caught == "CheckpointException only" and not issubclass(CheckpointException, Exception)
PY
