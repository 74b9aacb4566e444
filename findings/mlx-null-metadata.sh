#!/usr/bin/env bash
# mlx 0.32.4: save_safetensors writes "__metadata__": null into the header.
#
# Expected: no __metadata__, or a mapping of strings, as the format's description has it.
# Seen: the header holds "__metadata__":null. The safetensors library reads it; a reader that asks
#   for a mapping refuses the file.
# So: a reader of headers takes null for none.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet 'mlx[cpu]==0.32.4' safetensors==0.8.0 numpy==2.4.6
venv/bin/python - <<'PY'
import json
import mlx.core as mx
from safetensors import safe_open
mx.save_safetensors("w.safetensors", {"w": mx.ones((2, 2))})
data = open("w.safetensors", "rb").read()
header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
print("header:", header)
assert "__metadata__" in header and header["__metadata__"] is None
with safe_open("w.safetensors", "numpy") as file:
    assert file.metadata() is None
PY
