#!/usr/bin/env bash
# keras 3.15.1: F1Score of a model with one output is the same number for every model: that of calling everything positive.
#
# Expected: the F1 at a threshold of 0.5, as BinaryAccuracy, Precision and Recall take it.
# Seen: without a threshold the largest output of a row is its prediction, and of one output that is always it. A perfect model, its
#   opposite and a random one have 2p / (1 + p) each, p being the share of positives: 0.46 here, at every epoch. FBetaScore too.
# So: give F1Score(threshold=0.5) where the last layer has one unit.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 keras==3.15.1 jax==0.10.2 jaxlib==0.10.2
KERAS_BACKEND=jax venv/bin/python - <<'PY'
import keras
import numpy as np

draw = np.random.default_rng(0)
labels = (np.arange(1000) % 10 < 3).astype("float32")[:, None]
models = {"perfect": 0.05 + 0.9 * labels, "opposite": 0.95 - 0.9 * labels, "random": draw.random((1000, 1)), "never": 0 * labels + 0.01}
def score(metric, given):
    metric.update_state(labels, given)
    return round(float(np.asarray(metric.result()).squeeze()), 2)
seen = {name: score(keras.metrics.F1Score(), given) for name, given in models.items()}
beta = {name: score(keras.metrics.FBetaScore(beta=2.0, average="macro"), given) for name, given in models.items()}
right = {name: score(keras.metrics.F1Score(threshold=0.5), given) for name, given in models.items()}
print("F1Score():", seen, "FBetaScore(beta=2):", beta, "F1Score(threshold=0.5):", right)
assert set(seen.values()) == {round(2 * 0.3 / 1.3, 2)} and len(set(beta.values())) == 1, (seen, beta)
assert right["perfect"] == 1 and right["opposite"] == right["never"] == 0 and 0.3 < right["random"] < 0.45, right
PY
