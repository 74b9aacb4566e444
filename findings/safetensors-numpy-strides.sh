#!/usr/bin/env bash
# safetensors 0.8.0: numpy save_file of a transposed array stores other numbers.
#
# Expected: the values of the array, or an error, as safetensors.torch gives one.
# Seen: the memory's order under the array's shape: [[1, 2], [3, 4]].T comes back as [[1, 2], [3,
#   4]]. 0.7.0 stored it right.
# So: numpy.ascontiguousarray before save_file. A transposed weight (Conv1D to Linear) is the usual
#   case, and no shape shows it where the matrix is square.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6
venv/bin/python - <<'PY'
import importlib.metadata as metadata, subprocess, sys
TRY = """
import numpy as np
from safetensors.numpy import load_file, save_file
save_file({"w": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32).T}, "w.safetensors")
print(load_file("w.safetensors")["w"].tolist())
"""
seen = {}
for version in ("0.7.0", "0.8.0"):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"safetensors=={version}"], check=True)
    seen[version] = subprocess.run([sys.executable, "-c", TRY], check=True, capture_output=True, text=True).stdout.strip()
    print("safetensors", version, "stores [[1, 3], [2, 4]] as", seen[version])
assert seen == {"0.7.0": "[[1.0, 3.0], [2.0, 4.0]]", "0.8.0": "[[1.0, 2.0], [3.0, 4.0]]"}, seen
PY
