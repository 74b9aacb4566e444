#!/usr/bin/env bash
# mlx 0.32.4: float8 weights of a safetensors file arrive as uint8.
#
# Expected: a float8 array, or an error, as float64 gives one.
# Seen: dtype uint8 and the codes as whole numbers: 1.0 is read as 56.
# So: look at the file's header for float8 before mlx does; a dtype of uint8 does not tell codes
#   from numbers.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet 'mlx[cpu]==0.32.4' torch==2.13.0 safetensors==0.8.0 numpy==2.4.6 packaging
venv/bin/python - <<'PY'
import mlx.core as mx, torch
from safetensors.torch import save_file
save_file({"w": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "w.safetensors")
w = mx.load("w.safetensors")["w"]
print("float8_e4m3fn ones are read as", w.dtype, w.tolist())
assert w.dtype == mx.uint8 and w.tolist() == [[56, 56], [56, 56]]
PY
