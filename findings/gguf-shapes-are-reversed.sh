#!/usr/bin/env bash
# gguf 0.19.0: ReaderTensor.shape is the reverse of the shape that was written and of ReaderTensor.data.
#
# Expected: one shape: a matrix of 3 x 64 has the shape (3, 64).
# Seen: shape is [64, 3], as the file has it; data has (3, 64), and of a quantised tensor its rows
#   are bytes: (3, 68) for 64 numbers in Q8_0.
# So: take rows and columns from reversed(tensor.shape), never from data.shape of a quantised
#   tensor.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet gguf==0.19.0 numpy==2.4.6
venv/bin/python - <<'PY'
import numpy as np
import gguf
writer = gguf.GGUFWriter("x.gguf", "llama")
weight = np.zeros((3, 64), np.float32)
writer.add_tensor("plain.weight", weight)
packed = gguf.GGMLQuantizationType.Q8_0
writer.add_tensor("packed.weight", gguf.quantize(weight, packed), raw_dtype=packed)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
seen = {tensor.name: (tensor.shape.tolist(), tensor.data.shape) for tensor in gguf.GGUFReader("x.gguf").tensors}
print("shape, and the shape of data:", seen)
assert seen == {"plain.weight": ([64, 3], (3, 64)), "packed.weight": ([64, 3], (3, 68))}, seen
PY
