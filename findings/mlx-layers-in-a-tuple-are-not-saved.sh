#!/usr/bin/env bash
# mlx 0.32.4: layers in a tuple, and layers and arrays under a name with a leading underscore, compute but are not trained or saved.
#
# Expected: as for a list of layers, which mlx.nn finds: all that a module computes with is among its parameters.
# Seen: parameters() looks into lists and dicts, and leaves out tuples and names like _head. Such layers get no gradient, and
#   save_weights leaves them out; load_weights with strict=True misses nothing, and the loaded model has random layers.
# So: keep layers in lists and under plain names, and compare outputs before and after loading.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet 'mlx[cpu]==0.32.4'
venv/bin/python - <<'PY'
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

class Tower(nn.Module):
    def __init__(self, kind, name):
        super().__init__()
        self.layers = kind(nn.Linear(4, 4, bias=False) for _ in range(2))
        self[name] = nn.Linear(4, 4, bias=False)
        self.name = name

    def __call__(self, given):
        for layer in self.layers:
            given = nn.relu(layer(given)) + given
        return self[self.name](given)

given = mx.ones((1, 4))
seen = {}
for kind, name in ((list, "head"), (tuple, "head"), (list, "_head")):
    model, again = Tower(kind, name), Tower(kind, name)
    gradients = nn.value_and_grad(model, lambda x, own=model: own(x).sum())(given)[1]
    model.save_weights("model.safetensors")
    again.load_weights("model.safetensors", strict=True)
    names = sorted(mx.load("model.safetensors"))
    assert names == sorted(path for path, _ in tree_flatten(gradients)), names
    seen[f"{kind.__name__}, {name}"] = names, bool(mx.array_equal(model(given), again(given)))
for key, found in seen.items():
    print(key, "stored:", found[0], "the loaded model is the same:", found[1])
layers = ["layers.0.weight", "layers.1.weight"]
assert seen == {"list, head": (["head.weight", *layers], True), "tuple, head": (["head.weight"], False), "list, _head": (layers, False)}
PY
