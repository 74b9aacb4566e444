#!/usr/bin/env bash
# lm-eval 0.4.13: limit=1.0 scores one document of each task, where 0.99 scores 99 % of them.
#
# Expected: all documents, as the next step after 0.5, 0.9 and 0.99: a number below 1 is a share.
# Seen: 1.0 is a count, of one. The accuracy is 0 or 1, and a loop over shares of a test set ends with its worst estimate. The number
#   of documents stands in the results under "n-samples" alone.
# So: give limit=None for all, and look at n-samples, effective.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 'lm-eval[hf]==0.4.13'
cat > pick.yaml <<'YAML'
task: pick
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["w7", "w8"]
doc_to_target: label
metric_list: [{metric: acc}]
YAML
HF_HUB_OFFLINE=1 HF_HOME="$work" venv/bin/python - <<'PY' 2>said || { cat said; exit 1; }
import json

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny_llama import base
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")
with open("rows.jsonl", "w") as file:
    for row in range(40):
        file.write(json.dumps({"question": f"w{3 + row} w{5 + row}", "label": row % 2}) + "\n")
model = HFLM(pretrained=base, tokenizer=tokenizer, batch_size=8)
seen = {}
for limit in (0.5, 0.9, 1.0, None):
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=["pick"],
        limit=limit,
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=0,
    )
    seen[limit] = found["n-samples"]["pick"]["effective"], round(found["results"]["pick"]["acc,none"], 2)
print("documents and accuracy by limit:", seen)
assert {limit: own[0] for limit, own in seen.items()} == {0.5: 20, 0.9: 36, 1.0: 1, None: 40}, seen
assert seen[1.0][1] in (0, 1) and 0.2 < seen[None][1] < 0.8, seen
PY
