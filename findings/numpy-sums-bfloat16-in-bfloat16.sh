#!/usr/bin/env bash
# numpy 2.4.6 with ml_dtypes 0.6.0: the sum of 4096 bfloat16 ones is 256, and the mean square of a million weights 0.006, not 1.
#
# Expected: as numpy does for float16: sums and means of short types are taken in float32 (or by
#   pairs), and rounded at the end.
# Seen: sum, mean and var add one number after the other in bfloat16: 256 + 1 is 256 again, and all that
#   comes after it is lost. np.dot, @ and np.linalg.norm of the same array are right.
# So: x.astype(np.float32) before any sum of what safetensors' or jax's numpy arrays hold; dtype=np.float32
#   does as well.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 ml_dtypes==0.6.0
venv/bin/python - <<'PY'
import ml_dtypes
import numpy as np
drawn = np.random.default_rng(0).standard_normal((1000, 1000)).astype(np.float32)
weights = drawn.astype(ml_dtypes.bfloat16)
ones = np.ones(4096, ml_dtypes.bfloat16)
seen = {
    "sum of ones": float(ones.sum()),
    "of float16": float(ones.astype(np.float16).sum()),
    "with dtype": float(ones.sum(dtype=np.float32)),
    "dot": float(np.dot(ones, ones)),
    "norm": float(np.linalg.norm(ones)),
    "mean square": float((weights * weights).mean()),
    "of float32": float((weights.astype(np.float32) ** 2).mean()),
}
print(seen)
assert seen["sum of ones"] == 256 and seen["mean square"] < 0.01, seen
assert seen["of float16"] == seen["with dtype"] == seen["dot"] == 4096 and seen["norm"] == 64, seen
assert abs(seen["of float32"] - 1) < 0.01, seen
PY
