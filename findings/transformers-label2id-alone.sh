#!/usr/bin/env bash
# transformers 5.23.0: a config made with label2id alone has two labels called LABEL_0 and LABEL_1; one with id2label alone has no label2id.
#
# Expected: each of the two maps gives the other one, and the number of labels.
# Seen: label2id={"a": 0, "b": 1, "c": 2} is overwritten without a word and num_labels is 2; with id2label
#   alone the labels are right, label2id is None, and config.json has no label2id. Setting num_labels
#   later renames all labels.
# So: give both maps; a classifier whose file lacks label2id is not without labels.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.23.0
venv/bin/python - <<'PY'
import json
from transformers import BertConfig
names = {"a": 0, "b": 1, "c": 2}
one = BertConfig(label2id=names)
other = BertConfig(id2label={number: name for name, number in names.items()})
other.save_pretrained("config")
stored = json.load(open("config/config.json"))
again = BertConfig.from_pretrained("config")
seen = {
    "label2id alone": (one.num_labels, one.id2label, one.label2id),
    "id2label alone": (other.num_labels, other.id2label, other.label2id),
    "stored and read": (stored.get("label2id"), again.id2label, again.label2id),
}
other.num_labels = 4
seen["num_labels set"] = other.id2label
print(seen)
assert seen["label2id alone"] == (2, {0: "LABEL_0", 1: "LABEL_1"}, {"LABEL_0": 0, "LABEL_1": 1}), seen
assert seen["id2label alone"] == (3, {0: "a", 1: "b", 2: "c"}, None), seen
assert seen["stored and read"] == (None, {0: "a", 1: "b", 2: "c"}, None), seen
assert seen["num_labels set"][0] == "LABEL_0", seen
PY
