#!/usr/bin/env bash
# torch 2.13.0: a cast to float8_e4m3fn saturates at 448; ml_dtypes 0.6.0 gives NaN, and torch's own other float8 types do not saturate.
#
# Expected: one behaviour: infinity or NaN where a number is too large, as in every other floating-
#   point type of torch.
# Seen: 1e6 and infinity become 448 in float8_e4m3fn, infinity in float8_e5m2, NaN in
#   float8_e4m3fnuz. With ml_dtypes (and so JAX) 1e6 is NaN in float8_e4m3fn.
# So: compare with torch.finfo(dtype).max before the cast. isfinite() after it finds nothing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
venv/bin/python - <<'PY'
import ml_dtypes, numpy as np, torch
def cast(dtype):
    return torch.tensor([464.0, 1e6, float("inf")]).to(dtype).float().tolist()
seen = {str(d): cast(d) for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)}
seen["ml_dtypes"] = np.array([464.0, 1e6, np.inf], np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()
for name, values in seen.items():
    print(name, "of 464, 1e6 and infinity:", values)
assert seen["torch.float8_e4m3fn"] == [448.0] * 3
assert seen["torch.float8_e5m2"][1:] == [float("inf")] * 2
assert all(v != v for v in seen["torch.float8_e4m3fnuz"][1:])
assert all(v != v for v in seen["ml_dtypes"][1:])
PY
