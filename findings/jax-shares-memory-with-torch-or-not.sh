#!/usr/bin/env bash
# jax 0.10.2 with torch 2.13.0: whether a jax array of a torch tensor goes along when the tensor is trained depends on its address.
#
# Expected: one of the two: an array that shares the tensor's memory always, or a copy.
# Seen: jnp.from_dlpack shares the memory of a CPU tensor that begins at a multiple of 64 bytes, and copies any other. A whole parameter
#   is shared: what was kept as the base is the trained weight, and their difference is zero. A view of a flat buffer at an odd
#   place is a copy. The other way, torch.from_dlpack of a jax array lets torch change it in place, though jax arrays never change.
# So: copy on purpose: jnp.array(tensor.numpy()), or from_dlpack(tensor.clone()) of a tensor that nobody else holds.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu venv/bin/python -W error::UserWarning - <<'PY'
import jax.numpy as jnp
import torch

flat = torch.zeros(256)
start = -flat.data_ptr() % 64 // 4
seen = {}
for name, place in (("at 64 bytes", start), ("4 bytes on", start + 1), ("32 bytes on", start + 8)):
    weight = flat[place : place + 64]
    base, copy = jnp.from_dlpack(weight), jnp.array(weight.numpy())
    weight += 1
    update = jnp.array(weight.numpy()) - base
    assert float((jnp.array(weight.numpy()) - copy).mean()) == 1
    seen[name] = float(update.mean())
layer = torch.nn.Linear(64, 64)
base = jnp.from_dlpack(layer.weight.detach())
with torch.no_grad():
    layer.weight += 1
seen["a layer's weight"] = float((jnp.array(layer.weight.detach().numpy()) - base).mean())
never = jnp.zeros(8)
torch.from_dlpack(never).add_(1)
print("mean update, where it is 1:", seen, "a jax array of zeros after torch's add_:", never)
assert seen == {"at 64 bytes": 0, "4 bytes on": 1, "32 bytes on": 1, "a layer's weight": 0}, seen
assert float(never.mean()) == 1, never
PY
