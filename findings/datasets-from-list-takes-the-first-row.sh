#!/usr/bin/env bash
# datasets 5.2.0: Dataset.from_list takes its columns from the first row, and drops what only later rows have.
#
# Expected: a column of all rows, empty where a row lacks it, as the same rows give from a JSON file.
# Seen: results of five models, of which the first has no "f1", become a data set without "f1". Nothing is said. A key that
#   the first row has and others lack is filled with None.
# So: give all rows all keys, or write the rows to a file and use load_dataset("json").
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 datasets==5.2.0
HF_HUB_OFFLINE=1 HF_HOME="$work" venv/bin/python - <<'PY'
import json
import warnings

from datasets import Dataset, load_dataset

rows = [{"model": "base", "acc": 0.5}] + [{"model": f"expert {number}", "f1": 0.8} for number in range(4)]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    found = Dataset.from_list(rows)
file = load_dataset("json", data_files="rows.jsonl", split="train")
print("columns:", found.column_names, "of a file with the same rows:", file.column_names, "acc:", found["acc"][:])
assert found.column_names == ["model", "acc"] and sorted(file.column_names) == ["acc", "f1", "model"]
assert found["acc"][:] == [0.5, None, None, None, None] and found.num_rows == 5
assert not [one for one in told if "column" in str(one.message)]
PY
