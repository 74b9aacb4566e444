#!/usr/bin/env bash
# numpy 2.4.6 with ml_dtypes 0.6.0: np.save of bfloat16 comes back as two raw bytes a number.
#
# Expected: bfloat16, or an error when it is saved.
# Seen: np.load gives dtype V2 (void). No number can be read until somebody says
#   .view(ml_dtypes.bfloat16), and the file does not say that they were bfloat16.
# So: weights in half precision do not go through .npy or .npz; safetensors keeps the type.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 ml_dtypes==0.6.0
venv/bin/python - <<'PY'
import ml_dtypes, numpy as np
weights = np.array([1.0, 2.5], ml_dtypes.bfloat16)
np.save("w.npy", weights)
again = np.load("w.npy")
print("saved", weights.dtype, "loaded", again.dtype)
assert again.dtype == np.dtype("V2")
assert again.view(ml_dtypes.bfloat16).tolist() == [1.0, 2.5]
PY
