#!/usr/bin/env bash
# torch 2.13.0: a cast to float8_e8m0fnu takes the absolute value, and 0 becomes 2^-127; ml_dtypes 0.6.0 gives NaN for both.
#
# Expected: NaN for what the type cannot hold: it has neither sign nor zero.
# Seen: -3 becomes 4 and -1 becomes 1 in torch, so that a scale with a wrong sign is a right-looking scale; a block of
#   zeros gets the scale 2^-127 there, and NaN in ml_dtypes (numpy, JAX), which makes the block NaN.
# So: check scales for signs and zeros before the cast, in either library.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
venv/bin/python - <<'PY'
import ml_dtypes
import numpy as np
import torch

given = torch.tensor([-3.0, -1.0, 0.0, 3.0, 1.4])
with np.errstate(all="ignore"):
    theirs = given.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
ours = given.to(torch.float8_e8m0fnu).float()
print(given.tolist(), "are", ours.tolist(), "in torch and", theirs.tolist(), "in ml_dtypes")
assert ours.tolist() == [4.0, 1.0, 2.0**-127, 4.0, 1.0], ours
assert np.isnan(theirs[:3]).all() and theirs[3:].tolist() == [4.0, 1.0], theirs
PY
