#!/usr/bin/env bash
# pycocotools 2.0.11: the annotation whose id is 0 is found by no detector: its match counts as a false alarm, and it as missed.
#
# Expected: perfect boxes have an AP of 1, however annotations are numbered.
# Seen: a detection keeps the id of the annotation that it met, and 0 stands for none. Of four boxes that are numbered from 0
#   all of which were found, the AP is 0.56 and the recall 0.75. One box of a large set costs little, a class with few boxes much.
# So: number annotations from 1; those that enumerate() wrote start from 0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 pycocotools==2.0.11
venv/bin/python - <<'PY'
import contextlib
import io
import json

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

box = {"category_id": 1, "bbox": [10, 10, 20, 20]}
def scores(first):
    """AP and recall of a detector that gives back the four boxes of the ground truth."""
    images = [{"id": number, "width": 100, "height": 100} for number in range(1, 5)]
    boxes = [{"id": first + number, "image_id": number + 1, "area": 400, "iscrowd": 0, **box} for number in range(4)]
    with open("truth.json", "w") as file:
        json.dump({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cell"}]}, file)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        truth = COCO("truth.json")
        found = truth.loadRes([{"image_id": own["id"], "score": 0.9, **box} for own in images])
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert "warn" not in said.getvalue().lower(), said.getvalue()
    return [round(float(evaluation.stats[number]), 2) for number in (0, 8)]
seen = {f"numbered from {first}": scores(first) for first in (1, 0)}
print("AP and recall of perfect boxes:", seen)
assert seen == {"numbered from 1": [1.0, 1.0], "numbered from 0": [0.56, 0.75]}, seen
PY
