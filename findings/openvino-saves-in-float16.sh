#!/usr/bin/env bash
# openvino 2026.4.1: save_model stores float32 weights in float16: 100000 becomes 65504, and 1e-9 zero.
#
# Expected: the model that was saved; compression is asked for.
# Seen: compress_to_fp16 is True unless it is turned off, numbers past float16's range are cut to its largest, and nothing
#   is said. The weights are half as many bytes, and the loaded model computes with the cut numbers, also on a CPU.
# So: save_model(model, path, compress_to_fp16=False), or openvino.serialize.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 openvino==2026.4.1
venv/bin/python - <<'PY'
import os

import numpy as np
import openvino
from openvino import opset13

weight = np.array([[1e5, 3e38, 1e-9, 1 + 2**-12, 1.0, -2.0, 0.5, 8.0]], np.float32)
given = opset13.parameter([1, 8], np.float32)
model = openvino.Model([opset13.multiply(given, opset13.constant(weight))], [given])
openvino.save_model(model, "default.xml")
openvino.save_model(model, "whole.xml", compress_to_fp16=False)
seen = {}
for name in ("default", "whole"):
    runner = openvino.compile_model(openvino.Core().read_model(f"{name}.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = runner(np.ones((1, 8), np.float32))[0]
    seen[name] = os.path.getsize(f"{name}.bin"), found[0, :4].tolist()
print("bytes of weights and the first four of them:", seen)
assert seen["default"] == (16, [65504.0, 65504.0, 0.0, 1.0]), seen
assert seen["whole"] == (32, weight[0, :4].tolist()), seen
PY
