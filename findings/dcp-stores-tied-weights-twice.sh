#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint stores tied weights twice, and gives them back as two.
#
# Expected: one tensor under two names, as torch.save keeps it.
# Seen: 8 MB for a tied weight of 4 MB, and two tensors of their own after dcp_to_torch_save.
# So: a converter of such folders compares head and embedding before it says that a model is untied.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import pathlib, warnings
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
warnings.filterwarnings("ignore")
weight = torch.randn(1024, 1024)
tied = {"embedding": weight, "head": weight}
torch.save(tied, "tied.pt")
dcp.save(tied, checkpoint_id="folder")
dcp_to_torch_save("folder", "again.pt")
sizes = [pathlib.Path("tied.pt").stat().st_size, sum(f.stat().st_size for f in pathlib.Path("folder").glob("*.distcp"))]
again = torch.load("again.pt", weights_only=True)
shared = again["embedding"].data_ptr() == again["head"].data_ptr()
print("torch.save", sizes[0], "bytes, dcp", sizes[1], "bytes; shared after the way back:", shared)
assert sizes[1] > 1.9 * sizes[0] and not shared
PY
