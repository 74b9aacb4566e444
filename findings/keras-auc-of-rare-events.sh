#!/usr/bin/env bash
# keras 3.15.1: AUC of a model that ranks every case rightly is 0.5 where its probabilities are all below 0.005.
#
# Expected: 1: the area hangs on the order of scores alone.
# Seen: AUC cuts at 200 evenly spaced thresholds, from 0 to 1. A well-calibrated model of an event of one in a thousand has all its
#   scores between the first two, which leaves a straight line; its area under precision and recall is 0.001. Of ten times as
#   large probabilities in the same order both are 1. More thresholds move the limit: 2000 of them give 1 here.
# So: score rare events by sklearn.metrics.roc_auc_score, which sorts, or give thresholds= spaced as the logarithm.
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
labels = (np.arange(20000) % 1000 == 0).astype("float32")
chances = np.where(labels > 0, 0.004, 0.0005 + 0.0005 * draw.random(20000)).astype("float32")
assert chances[labels > 0].min() > chances[labels == 0].max()
def area(given, **settings):
    metric = keras.metrics.AUC(**settings)
    metric.update_state(labels, given)
    return round(float(metric.result()), 3)
logits = np.log(chances / (1 - chances))
seen = {
    "AUC": area(chances),
    "from logits": area(logits, from_logits=True),
    "precision and recall": area(chances, curve="PR"),
    "ten times the chances": area(10 * chances),
    "2000 thresholds": area(chances, num_thresholds=2000),
}
print("of a perfect order:", seen)
assert seen["AUC"] == seen["from logits"] == 0.5 and seen["precision and recall"] < 0.002, seen
assert seen["ten times the chances"] == seen["2000 thresholds"] == 1, seen
PY
