#!/usr/bin/env bash
# compressed-tensors 0.20.0: an NVFP4 weight is code x scale / global scale.
#
# Expected: three factors that are multiplied, as ModelOpt's weight_scale_2 is.
# Seen: weight_global_scale is the reciprocal: the code is multiplied by the group's scale and
#   divided by it.
# So: a reader that multiplies is off by the square of a number of about a thousand.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0
venv/bin/python - <<'PY'
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
group = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
codes, scale, whole = torch.full((1, 16), 6.0), torch.tensor([[448.0]]), torch.tensor([2688.0])
seen = dequantize(codes, scale, None, args=group, global_scale=whole).unique().tolist()
print("code 6, scale 448, global scale 2688 give", seen)
assert seen == [1.0], seen
PY
