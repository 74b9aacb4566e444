#!/usr/bin/env bash
# flax 0.12.8 with orbax 0.12.8: a checkpoint of an nnx model with twelve layers has its leaves in another order than the model.
#
# Expected: jax.tree.leaves gives the layers 0, 1, 2 to 11, of the model and of its checkpoint.
# Seen: a layer's number is a number in the model, and a text in the restored checkpoint. jax sorts the keys, and
#   the text "10" stands before "2". All shapes are equal, so nothing raises. An average or a distance over leaves
#   pairs layer 2 with layer 10. Up to ten layers all is well. flax's msgpack does the same to a list.
# So: restore with the model's state as the target, or pair leaves by their paths.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 orbax-checkpoint==0.12.8
venv/bin/python - "$work" 2> said <<'PY' || { cat said; exit 1; }
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx, serialization


class Model(nnx.Module):
    def __init__(self, layers):
        self.layers = nnx.List([nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(layers)])
        for number, layer in enumerate(self.layers):
            layer.kernel[...] = jnp.full((2, 2), float(number))


def order(tree):
    return [int(leaf[0, 0]) for leaf in jax.tree.leaves(tree)]


seen = {}
checkpointer = ocp.StandardCheckpointer()
for layers in (10, 12):
    state = nnx.state(Model(layers))
    folder = f"{sys.argv[1]}/{layers}"
    checkpointer.save(folder, nnx.to_pure_dict(state))
    checkpointer.wait_until_finished()
    seen[layers, "model"] = order(state)
    seen[layers, "orbax"] = order(checkpointer.restore(folder))
    target = jax.tree.map(jnp.zeros_like, nnx.to_pure_dict(state))
    seen[layers, "into the model"] = order(checkpointer.restore(folder, target))
    packed = serialization.to_bytes({"layers": [leaf for leaf in jax.tree.leaves(state)]})
    seen[layers, "msgpack"] = order(serialization.msgpack_restore(packed))
print("layers in the order of jax.tree.leaves:", seen)
for layers in (10, 12):
    straight, texts = list(range(layers)), sorted(range(layers), key=str)
    assert seen[layers, "model"] == seen[layers, "into the model"] == straight, seen
    assert seen[layers, "orbax"] == seen[layers, "msgpack"] == texts, seen
assert seen[12, "orbax"] == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9], seen
PY
! grep -qiE "order|sort|key" said || { cat said; exit 1; }
