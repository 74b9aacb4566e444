#!/usr/bin/env bash
# numpy 2.4.6: pinv of a float32 matrix of low rank takes its rounding for directions.
#
# Expected: a cut-off that knows the dtype, as torch.linalg.pinv has it.
# Seen: pinv's default cut-off is 1e-15 of the largest singular value, far below float32's rounding:
#   the result is millions of times too long.
# So: rtol=max(shape) * numpy.finfo(dtype).eps, or float64.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import numpy as np, torch
generator = np.random.default_rng(0)
a = (generator.standard_normal((40, 3)) @ generator.standard_normal((3, 40))).astype(np.float32)
ours, theirs = np.abs(np.linalg.pinv(a)).max(), float(torch.linalg.pinv(torch.from_numpy(a)).abs().max())
print("largest entry by numpy", ours, "and by torch", theirs)
assert ours > 1000 * theirs
PY
