#!/usr/bin/env bash
# gguf 0.19.0: Q8_0 of small numbers is worse than Q4_0, and of numbers near 1e-6 it is zero.
#
# Expected: 8 bits with a scale for every 32 numbers are off by half a percent whatever the size of the
#   tensor, and always by less than 4 bits.
# Seen: the scale, max/127, is a float16 without a factor for the tensor: numbers of 1e-3 are off by 0.5%,
#   of 1e-5 by 9%, and of 1e-6 all are lost. Q4_0 divides by 8 and lasts sixteen times as long;
#   MXFP4 has a scale of powers of two and does not care.
# So: B of an adapter or the difference of two models is not stored as Q8_0; use BF16 or F32, or
#   multiply it and write the factor into alpha.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet gguf==0.19.0 numpy==2.4.6
venv/bin/python - <<'PY'
import gguf
import numpy as np
seen = {}
for name in ("Q8_0", "Q4_0", "MXFP4"):
    kind = gguf.GGMLQuantizationType[name]
    for size in (1e-3, 1e-5, 1e-6):
        drawn = (size * np.random.default_rng(0).standard_normal((64, 256))).astype(np.float32)
        again = gguf.dequantize(gguf.quantize(drawn.copy(), kind), kind)
        seen[name, size] = round(float(np.linalg.norm(again - drawn) / np.linalg.norm(drawn)), 3)
print("relative error by type and size of the numbers:", seen)
assert seen["Q8_0", 1e-3] < 0.01 and seen["Q8_0", 1e-5] > 0.05 and seen["Q8_0", 1e-6] > 0.95, seen
assert seen["Q4_0", 1e-6] < 0.2 and seen["MXFP4", 1e-6] < 0.2, seen
PY
