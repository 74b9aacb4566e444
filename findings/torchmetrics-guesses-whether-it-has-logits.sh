#!/usr/bin/env bash
# torchmetrics 1.9.0: BinaryAccuracy and BinaryAUROC of the same logits depend on how they are cut into batches.
#
# Expected: one accuracy of a thousand logits, whatever the batch size; for AUROC the order of scores is all that counts.
# Seen: each batch is taken for logits where one value is outside [0, 1], and for probabilities where none is. A batch of small
#   positive logits is compared with 0.5 instead of 0, and for AUROC some batches go through a sigmoid and some do not. In
#   batches of one 0.78 becomes 0.63, and an AUROC of 0.85 becomes 0.59. Averaged models give small logits.
# So: give probabilities (logits.sigmoid()) to every metric of this library, never logits.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0
venv/bin/python - <<'PY'
import torch
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

torch.manual_seed(0)
labels = torch.randint(0, 2, (1000,))
logits = (2 * labels - 1) * 0.3 + 0.4 * torch.randn(1000)


def score(metric, values, size):
    for part in range(0, 1000, size):
        metric.update(values[part : part + size], labels[part : part + size])
    return round(float(metric.compute()), 3)


right = float(((logits > 0) == labels).float().mean())
accuracy = {size: score(BinaryAccuracy(), logits, size) for size in (1, 2, 4, 1000)}
area = {size: score(BinaryAUROC(), logits, size) for size in (1, 4, 1000)}
given = {size: score(BinaryAUROC(), logits.sigmoid(), size) for size in (1, 1000)}
print("right are", right, "accuracy by batch size:", accuracy, "AUROC:", area, "AUROC of probabilities:", given)
assert abs(accuracy[1000] - right) < 1e-3 and accuracy[1] < right - 0.08, accuracy
assert area[1] < area[1000] - 0.1 and given[1] == given[1000] == area[1000], (area, given)
PY
