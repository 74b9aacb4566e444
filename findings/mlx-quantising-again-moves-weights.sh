#!/usr/bin/env bash
# mlx 0.32.4: weights that were dequantised and are quantised again are other weights.
#
# Expected: numbers that lie on a format's steps stay where they are, as in gguf's formats.
# Seen: of more than 2 bits a second rounding moves them by a fifth to a half of what the first one did, since
#   the scale is fitted anew to what is now the group's range. What was exactly zero does not stay zero
#   either: of 8 bits a tenth of a pruned weight's zeros is lost.
# So: keep the packed tensors of layers that did not change; do not dequantise and quantise a whole model.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "mlx[cpu]==0.32.4" numpy==2.4.6
venv/bin/python - <<'PY'
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)
draw = np.random.default_rng(0)
weight = (0.02 * draw.standard_normal((256, 512))).astype(np.float32)
pruned = np.where(draw.random(weight.shape) < 0.5, 0, weight).astype(np.float32)
def again(given, bits):
    parts = mx.quantize(mx.array(given), group_size=64, bits=bits)
    return np.array(mx.dequantize(*parts, group_size=64, bits=bits))
moved, zeros = {}, {}
for bits in (2, 3, 4, 5, 6, 8):
    once = again(weight, bits)
    twice = again(once, bits)
    rounding = np.linalg.norm(once - weight)
    moved[bits] = float(round(np.linalg.norm(twice - once) / rounding, 3))
    zeros[bits] = float(round((again(pruned, bits)[pruned == 0] == 0).mean(), 2))
print("moved by quantising again, in units of the first rounding, by bits:", moved)
print("zeros of a pruned weight that stay zero, by bits:", zeros)
assert moved[2] == 0 and min(moved[bits] for bits in (3, 4, 5, 6, 8)) > 0.1, moved
assert zeros[2] == 1 and zeros[4] < 0.98 and zeros[8] < 0.95, zeros
PY
