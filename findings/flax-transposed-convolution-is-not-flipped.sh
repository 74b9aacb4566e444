#!/usr/bin/env bash
# flax 0.12.8: ConvTranspose with a kernel of torch 2.13.0 or keras 3.15.1, its axes in flax's order, is another layer.
#
# Expected: the layer of torch, since Conv is the same layer after its axes were reordered.
# Seen: flax correlates where the others convolve: each window is turned by 180 degrees. A kernel [1, 2, 3] acts
#   as [3, 2, 1]. Shapes fit, symmetric kernels agree, and nothing is said. An upsampling model that one rule
#   converted is wrong in these layers alone.
# So: flip the window's axes, or give transpose_kernel=True and keras' kernel as it is.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 keras==3.15.1
KERAS_BACKEND=jax venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import keras
import numpy as np
import torch
from flax import linen

kernel = np.array([1.0, 2.0, 3.0], np.float32)
given = np.array([0.0, 1.0, 0.0, 0.0], np.float32)


def of_torch(layer):
    layer.weight.data = torch.from_numpy(kernel).reshape(1, 1, 3)
    return layer(torch.from_numpy(given).reshape(1, 1, 4)).detach().numpy().ravel().tolist()


def of_flax(layer, own=kernel):
    parameters = {"params": {"kernel": own.reshape(3, 1, 1)}}
    return np.asarray(layer.apply(parameters, given.reshape(1, 4, 1))).ravel().tolist()


def of_keras(layer):
    layer.build((1, 4, 1))
    layer.set_weights([kernel.reshape(3, 1, 1)])
    return np.asarray(layer(given.reshape(1, 4, 1))).ravel().tolist()


back = linen.ConvTranspose(1, (3,), padding="VALID", use_bias=False)
turned = linen.ConvTranspose(1, (3,), padding="VALID", use_bias=False, transpose_kernel=True)
seen = {
    "torch": of_torch(torch.nn.ConvTranspose1d(1, 1, 3, bias=False)),
    "keras": of_keras(keras.layers.Conv1DTranspose(1, 3, use_bias=False)),
    "flax": of_flax(back),
    "flax, flipped": of_flax(back, kernel[::-1].copy()),
    "flax, transpose_kernel": of_flax(turned),
    "torch's Conv1d": of_torch(torch.nn.Conv1d(1, 1, 3, bias=False)),
    "flax's Conv": of_flax(linen.Conv(1, (3,), padding="VALID", use_bias=False)),
}
print("what a 1 after a 0 becomes under the kernel [1, 2, 3]:", seen)
assert seen["torch"] == seen["keras"] == seen["flax, flipped"] == seen["flax, transpose_kernel"] == [0, 1, 2, 3, 0, 0], seen
assert seen["flax"] == [0, 3, 2, 1, 0, 0] and seen["flax's Conv"] == seen["torch's Conv1d"], seen
PY
! grep -qiE "kernel|transpos|flip" said || { cat said; exit 1; }
