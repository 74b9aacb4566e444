#!/usr/bin/env bash
# torchmetrics 1.9.0: in a MetricCollection two metrics that agree on the first batch may give one number for ever after.
#
# Expected: the accuracy at a threshold of 0.7 beside that at 0.5, as each gives alone.
# Seen: after the first batch the collection puts metrics with equal counts into one group, whatever their arguments, and from
#   then on it updates one of them alone. A sure first batch, with no score between 0.5 and 0.7, hides the second threshold
#   for the rest of the test set; an ignore_index is lost likewise. Shuffling brings it back.
# So: give compute_groups=False, or the groups by hand, where the metrics of a collection differ in their arguments.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0
venv/bin/python - <<'PY'
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

sure = torch.tensor([0.9, 0.1, 0.95, 0.05]), torch.tensor([1, 0, 1, 1])
rest = torch.tensor([0.6, 0.6, 0.6, 0.2]).repeat(10), torch.zeros(40, dtype=torch.long)
def thresholds(batches, **settings):
    pair = {"low": BinaryAccuracy(threshold=0.5), "high": BinaryAccuracy(threshold=0.7)}
    both = MetricCollection(pair, **settings)
    for batch in batches:
        both.update(*batch)
    return {name: round(float(value), 3) for name, value in both.compute().items()}
seen = {
    "the sure batch first": thresholds([sure, rest]),
    "the sure batch last": thresholds([rest, sure]),
    "compute_groups=False": thresholds([sure, rest], compute_groups=False),
}
print(seen)
right = {"low": 0.295, "high": 0.977}
assert seen["compute_groups=False"] == seen["the sure batch last"] == right, seen
assert seen["the sure batch first"] == {"low": 0.977, "high": 0.977}, seen

def padded(**settings):
    own = {"num_classes": 3, "average": "micro"}
    both = MetricCollection({"all": MulticlassAccuracy(**own), "without 0": MulticlassAccuracy(ignore_index=0, **own)}, **settings)
    both.update(torch.tensor([1, 2, 2]), torch.tensor([1, 2, 1]))
    both.update(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 2]))
    return {name: round(float(value), 3) for name, value in both.compute().items()}
seen = padded(), padded(compute_groups=False)
print("ignore_index, grouped and not:", seen)
assert seen[0]["all"] == seen[0]["without 0"] and seen[1]["all"] > seen[1]["without 0"] + 0.1, seen
PY
