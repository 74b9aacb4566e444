#!/usr/bin/env bash
# lm-eval 0.4.13: a model that gives NaN alone has an accuracy: the share of questions whose first choice is right.
#
# Expected: a NaN for its score, as its perplexity is, or a warning.
# Seen: the choice is the argmax of the choices' log-likelihoods, and the argmax of NaNs is the first. A task of even
#   labels gives chance, one of uneven labels more: a merge that overflowed looks like a bad one, and here like a good one.
# So: look at log-likelihoods (log_samples) of one question, or at a perplexity, before a score of a new model is believed.
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
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
YAML
cat > words.yaml <<'YAML'
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
YAML
HF_HUB_OFFLINE=1 HF_HOME="$work" venv/bin/python - <<'PY' 2>said || { cat said; exit 1; }
import json
import math

import lm_eval
from lm_eval.tasks import TaskManager
from tiny_llama import base, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
with torch.no_grad():
    base.model.norm.weight.fill_(float("nan"))
base.save_pretrained("model")
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2").save_pretrained("model")
with open("rows.jsonl", "w") as file:
    for row in range(20):
        label = 0 if row < 14 else 1 if row < 18 else 2
        own = {"question": f"w{3 + row} w{5 + row}", "choices": ["w7", "w8 w9", "w10 w11 w12"], "label": label}
        file.write(json.dumps(own) + "\n")
found = lm_eval.simple_evaluate(
    model="hf",
    model_args={"pretrained": "model", "dtype": "float32"},
    tasks=["pick", "words"],
    task_manager=TaskManager(include_path=".", include_defaults=False),
    device="cpu",
    bootstrap_iters=0,
)["results"]
seen = found["pick"]["acc,none"], found["pick"]["acc_norm,none"], found["words"]["word_perplexity,none"]
print("accuracy, normalised accuracy and perplexity of a model of NaN:", seen)
assert seen[:2] == (0.7, 0.7) and math.isnan(seen[2]), seen
PY
! grep -qw -i nan said
