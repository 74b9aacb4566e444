#!/usr/bin/env bash
# torch 2.13.0: the mean of two state dicts under spectral_norm is a layer of norm 3.6 in eval mode, not of 1 or less.
#
# Expected: weights of spectral norm 1, which is what the layer is for, or less, as the mean of the two plain weights has (0.7).
# Seen: the file holds the unscaled weight and the two vectors by which its norm was last estimated. In eval mode the norm
#   is u·Wv of the stored vectors, and means of these are shorter and belong to no weight. torch.nn.utils.spectral_norm, the older
#   one, does the same. A step in training mode estimates anew, and most of it is gone: a test in that mode does not find it.
#   Nor is the mean of unscaled weights, which are as long as they like, the mean of what the two models compute with.
# So: remove_parametrizations in each model first, and merge the weights that are left.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import copy

import torch
from torch.nn.utils import parametrizations, spectral_norm

seen = {}
for name, wrap in (("parametrizations", parametrizations.spectral_norm), ("utils", spectral_norm)):
    torch.manual_seed(0)
    base = wrap(torch.nn.Linear(64, 64, bias=False))
    models = []
    for _ in range(2):
        model = copy.deepcopy(base).train()
        steps = torch.optim.Adam(model.parameters(), lr=0.005)
        wanted, given = torch.randn(64, 64), torch.randn(256, 64)
        for _ in range(100):
            steps.zero_grad()
            ((model(given) - given @ wanted) ** 2).mean().backward()
            steps.step()
        with torch.no_grad():
            for _ in range(50):  # the estimates of the norm of each model alone are right
                model(given)
        models.append(model.eval())
    first, second = (model.state_dict() for model in models)
    mean = copy.deepcopy(base).eval()
    mean.load_state_dict({key: (first[key] + second[key]) / 2 for key in first}, strict=True)
    eye = torch.eye(64)

    def norm(model):
        with torch.no_grad():
            return round(float(torch.linalg.matrix_norm(model(eye), 2)), 2)

    both = torch.nn.Linear(64, 64, bias=False)
    both.weight.data = (models[0].weight + models[1].weight).detach() / 2
    seen[name] = {"models": [norm(model) for model in models], "mean": norm(mean), "of plain weights": norm(both)}
    mean.train()(torch.randn(1, 64))
    seen[name]["after a step in train"] = norm(mean.eval())
print("spectral norms:", seen)
for found in seen.values():
    assert found["models"] == [1, 1] and found["of plain weights"] <= 1.0, seen
    assert found["mean"] > 2 > 1.5 > found["after a step in train"], seen
PY
[ ! -s said ] || { cat said; exit 1; }
