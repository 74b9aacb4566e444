#!/usr/bin/env bash
# mlx 0.32.4: on a CPU the mean of a million float16 ones is infinite, and so are the variance and the norm of such a tensor.
#
# Expected: the sum is taken in float32 and the mean rounded at the end, as torch and numpy do.
# Seen: the sum, 1048576, is stored as float16, whose largest number is 65504, and then divided. In
#   bfloat16, which has room, all three are right.
# So: statistics of float16 weights after astype(mx.float32), or along an axis first; an infinite mean does not
#   say that a weight is.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet 'mlx[cpu]==0.32.4' numpy==2.4.6
venv/bin/python - <<'PY'
import math
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)
seen = {}
for dtype in (mx.float16, mx.bfloat16):
    ones = mx.ones((1 << 20,), dtype=dtype)
    seen[str(dtype)] = mx.mean(ones).item(), mx.var(ones).item(), mx.linalg.norm(ones).item()
seen["numpy"] = float(np.ones(1 << 20, np.float16).mean())
print("mean, variance and norm of 2^20 ones:", seen)
assert seen["mlx.core.bfloat16"] == (1.0, 0.0, 1024.0) and seen["numpy"] == 1.0, seen
assert not any(map(math.isfinite, seen["mlx.core.float16"])), seen
PY
