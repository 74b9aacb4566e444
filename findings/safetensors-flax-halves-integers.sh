#!/usr/bin/env bash
# safetensors 0.8.0 with jax 0.10.2: load_file of safetensors.flax gives int64 numbers modulo 2^32, and float64 as float32.
#
# Expected: the stored numbers and dtypes, as in safetensors.torch and safetensors.numpy, or a refusal.
# Seen: jax has no 64 bits unless it is told so: 2^40 + 5 arrives as 5, 2^31 as -2^31, and 1e-60 as 0. Nothing is said;
#   a float64 that becomes infinite brings numpy's remark on an overflow, with no name. Saved again, the file is of 32 bits.
# So: jax.config.update("jax_enable_x64", True) before loading, or safetensors.numpy.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 safetensors==0.8.0
venv/bin/python - <<'PY'
import warnings

import jax
import numpy as np
from safetensors.flax import load_file, save_file
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy

held = {"tokens_seen": np.array([2**40 + 5, 2**31, 7]), "scales": np.array([1e-60, 1 / 3])}
save_numpy(held, "model.safetensors")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    seen = {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in load_file("model.safetensors").items()}
    save_file(load_file("model.safetensors"), "again.safetensors")
again = {name: str(tensor.dtype) for name, tensor in load_numpy("again.safetensors").items()}
jax.config.update("jax_enable_x64", True)
whole = load_file("model.safetensors")
print("loaded:", seen, "saved again:", again, "warnings:", [str(one.message) for one in told])
assert seen["tokens_seen"] == ("int32", [5, -(2**31), 7]) and seen["scales"][1][0] == 0, seen
assert again == {"tokens_seen": "int32", "scales": "float32"} and not told, again
assert all(np.array_equal(np.asarray(whole[name]), held[name]) for name in held)
PY
