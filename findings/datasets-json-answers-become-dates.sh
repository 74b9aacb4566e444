#!/usr/bin/env bash
# datasets 5.2.0: strings of a JSON file that all look like dates are loaded as dates, in a message of a chat too.
#
# Expected: text: JSON has no dates, and the file has quotes around them.
# Seen: a column in which every string reads as YYYY-MM-DD is a timestamp. An answer of "2019-05-01" is then a datetime, its text
#   in a prompt or beside a model's answer is "2019-05-01 00:00:00", and an exact match is 0. One row more that is no date leaves
#   the column text: a filtered or shorter file has other types. features= with string comes too late: it is the dates that it makes
#   text of. to_json writes them as milliseconds: 1556668800000.
# So: read such files by json.loads and Dataset.from_list, which keeps text, and look at dataset.features.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 datasets==5.2.0
HF_HUB_OFFLINE=1 HF_HOME="$work" venv/bin/python - <<'PY'
import json
import warnings

from datasets import Dataset, Features, Value, load_dataset

warnings.simplefilter("error", UserWarning)
def loaded(name, rows, **settings):
    with open(f"{name}.json", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return load_dataset("json", data_files=f"{name}.json", split="train", **settings)
dates = [{"question": "When?", "answer": answer} for answer in ("2019-05-01", "2020-06-02")]
own = loaded("dates", dates)
mixed = loaded("mixed", [*dates, {"question": "When?", "answer": "in May"}])
text = loaded("text", dates, features=Features({"question": Value("string"), "answer": Value("string")}))
chat = loaded("chat", [{"messages": [{"role": "assistant", "content": "2019-05-01"}]}])
own.to_json("again.json")
with open("again.json") as file:
    again = json.loads(file.readline())["answer"]
seen = {
    "dates alone": f"{own[0]['answer']}",
    "and one that is none": f"{mixed[0]['answer']}",
    "features=": f"{text[0]['answer']}",
    "from_list": f"{Dataset.from_list(dates)[0]['answer']}",
    "chat": f"{chat[0]['messages'][0]['content']}",
    "written again": again,
}
print(seen)
assert seen["dates alone"] == seen["features="] == seen["chat"] == "2019-05-01 00:00:00", seen
assert seen["and one that is none"] == seen["from_list"] == "2019-05-01" and again == 1556668800000, seen
PY
