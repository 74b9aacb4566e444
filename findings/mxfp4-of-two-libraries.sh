#!/usr/bin/env bash
# gguf 0.19.0 and compressed-tensors 0.20.0: the same weights in MXFP4 have other scales.
#
# Expected: one format of 4-bit numbers with one scale for 32 of them, so one result.
# Seen: a block whose largest number is 7.9 has the scale 1 in gguf, which makes 6 of it, and 2 in
#   compressed-tensors, which makes 8; up to 6 both have 1. Small numbers of such blocks differ too: 0.5
#   stays 0.5 in the one and is 0 in the other.
# So: MXFP4 of one library is no reference for the other's; compare each with the weights themselves.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 gguf==0.19.0 numpy==2.4.6
venv/bin/python - <<'PY'
import gguf
import numpy as np
import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams

kind, scheme = gguf.GGMLQuantizationType.MXFP4, PRESET_SCHEMES["MXFP4A16"]["weights"]
seen = {}
for largest in (5.9, 6.0, 7.1, 7.9):
    block = np.zeros((1, 32), np.float32)
    block[0, :2] = largest, 0.5
    weight = torch.from_numpy(block)
    scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), scheme)
    theirs = fake_quantize(weight, scale, zero, scheme)
    seen[largest] = gguf.dequantize(gguf.quantize(block, kind), kind)[0, :2].tolist(), theirs[0, :2].tolist()
for largest, (first, second) in seen.items():
    print(f"[{largest}, 0.5]: gguf {first}, compressed-tensors {second}")
assert all(seen[largest][0] == seen[largest][1] == [6.0, 0.5] for largest in (5.9, 6.0)), seen
assert all(seen[largest][0] == [6.0, 0.5] and seen[largest][1] == [8.0, 0.0] for largest in (7.1, 7.9)), seen
PY
