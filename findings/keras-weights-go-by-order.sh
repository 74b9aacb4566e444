#!/usr/bin/env bash
# keras 3.15.1: load_weights of a .weights.h5 file goes by the order of layers and not by their names, which it stores.
#
# Expected: the layer "query" gets what was stored of "query": the file holds the name, and get_layer finds it.
# Seen: a file's groups are dense, dense_1, … in the order of model.layers. With the outputs listed in another order two
#   layers of one shape swap their weights, and nothing is said.
# So: compare layers by name after loading, or load the old model whole (.keras) and copy by get_layer(name).
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

def model(order):
    given = keras.Input((4,))
    found = {name: keras.layers.Dense(4, name=name)(given) for name in ("query", "key")}
    return keras.Model(given, [found[name] for name in order])
def kernels(own):
    return {name: float(own.get_layer(name).kernel[0, 0]) for name in ("query", "key")}
trained = model(["query", "key"])
trained.get_layer("query").kernel.assign(np.full((4, 4), 1.0))
trained.get_layer("key").kernel.assign(np.full((4, 4), 2.0))
trained.save_weights("own.weights.h5")
with h5py.File("own.weights.h5") as file:
    names = {group: str(file["layers"][group]["vars"].attrs["name"]) for group in ("dense", "dense_1")}
seen = {}
for order in (["query", "key"], ["key", "query"]):
    again = model(order)
    again.load_weights("own.weights.h5")
    seen[" ".join(order)] = kernels(again)
print("names in the file:", names, "trained:", kernels(trained), "loaded, by the order of outputs:", seen)
assert names == {"dense": "query", "dense_1": "key"}, names
assert seen["query key"] == {"query": 1.0, "key": 2.0} and seen["key query"] == {"query": 2.0, "key": 1.0}, seen
PY
