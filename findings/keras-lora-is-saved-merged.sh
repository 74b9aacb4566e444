#!/usr/bin/env bash
# keras 3.15.1: save_weights of a model with enable_lora stores the merged kernel, and neither the base nor the factors.
#
# Expected: a checkpoint of LoRA training, from which the adapter is trained on or taken.
# Seen: the file holds one kernel with the update in it. Loaded into a model with LoRA, or back into the one that was
#   saved, the kernel is the merged one and lora_kernel_b is zero: the adapter is gone, its rank is free for a new update,
#   and the frozen base is another. What the model gives is the same, so that no score shows it.
# So: store layer.lora_kernel_a and layer.lora_kernel_b of each layer oneself, and the base once.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 h5py==3.16.0
KERAS_BACKEND=jax venv/bin/python - <<'PY'
import h5py
import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
layer = model.layers[0]
base = np.array(layer.kernel, copy=True)
layer.enable_lora(2)
layer.lora_kernel_b.assign(np.ones(layer.lora_kernel_b.shape))
given = np.ones((2, 6), np.float32)
before = np.asarray(model(given))
model.save_weights("own.weights.h5")
with h5py.File("own.weights.h5") as file:
    stored = {number: np.asarray(own).shape for number, own in file["layers"]["dense"]["vars"].items()}
    merged = np.asarray(file["layers"]["dense"]["vars"]["0"])
update = float(np.abs(merged - base).max())
model.load_weights("own.weights.h5")
left = float(np.abs(np.asarray(layer.lora_kernel_b)).max())
moved = float(np.abs(np.asarray(layer._kernel) - merged).max())
off = float(np.abs(np.asarray(model(given)) - before).max())
print("stored:", stored, "its kernel is off the base's by", update, "loaded: lora_kernel_b", left, "output off by", off)
assert stored == {"0": (6, 5), "1": (5,)} and update > 0.1, (stored, update)
assert left == 0 and moved == 0 and off < 1e-5, (left, moved, off)
PY
