#!/usr/bin/env bash
# torchmetrics 1.9.0: Accuracy(task="multiclass") and MulticlassAccuracy, which it is made of, give 0.9 and 0.33 for the same predictions.
#
# Expected: one number: the first makes an object of the second.
# Seen: the first counts all answers together (micro), the second takes the mean over classes (macro). The functions accuracy and
#   multiclass_accuracy differ likewise, and so do precision, recall and F1. In a table half of whose models were scored by the
#   one and half by the other, the better model of an uneven test set comes out worse.
# So: give average="micro" or "macro" always, and write down which.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0
venv/bin/python - <<'PY'
import torch
from torchmetrics import Accuracy, F1Score
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.functional import accuracy
from torchmetrics.functional.classification import multiclass_accuracy

labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
same = torch.zeros(1000, dtype=torch.long)
careful = labels.clone()
careful[:300] = 1
seen = {}
for name, said in (("always class 0", same), ("the rare classes right", careful)):
    pairs = {
        "Accuracy": (Accuracy(task="multiclass", num_classes=3), MulticlassAccuracy(num_classes=3)),
        "F1": (F1Score(task="multiclass", num_classes=3), MulticlassF1Score(num_classes=3)),
    }
    seen[name] = {key: [round(float(each(said, labels)), 2) for each in pair] for key, pair in pairs.items()}
both = [float(accuracy(same, labels, task="multiclass", num_classes=3)), float(multiclass_accuracy(same, labels, num_classes=3))]
print("with task=, and the class for the task:", seen, "functions:", both)
first, second = seen.values()
assert first["Accuracy"] == [0.9, 0.33] and both[0] > 0.89 and both[1] < 0.34, (seen, both)
assert first["Accuracy"][0] > second["Accuracy"][0] and first["Accuracy"][1] < second["Accuracy"][1], seen
PY
