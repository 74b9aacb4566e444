#!/usr/bin/env bash
# lm-eval 0.4.13: with cache_requests a task whose prompt, documents or fewshot_seed was edited is scored with the old ones.
#
# Expected: another prompt is another cache entry, as another number of examples is.
# Seen: the cache goes by the task's name, the number of examples, the system prompt and the tokenizer's name. What
#   doc_to_text, description, the dataset and the seeds say is not part of it, nor is what the tokenizer's chat template
#   says. The new prompt is written into the results' configs, beside the old prompt's score. The cache lies in the package's
#   folder and outlives the shell.
# So: run with cache_requests="refresh" (rewrite_requests_cache=True) after each edit, or give each prompt a name of its own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 lm-eval==0.4.13
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import os

os.environ["LM_HARNESS_CACHE_PATH"] = os.path.abspath("cache")
import lm_eval
from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask


class Polite(LM):
    """A model that knows the answer where it is asked with a please."""

    tokenizer_name = "words"

    def loglikelihood(self, requests):
        self.asked = requests[0].args[0]
        return [(float(("please" in asked.args[0]) == (asked.args[1] == " right")), False) for asked in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


def task(prompt):
    return ConfigurableTask(
        config={
            "task": "mine",
            "custom_dataset": lambda **_: {"test": Dataset.from_list([{"question": f"question {n}", "answer": 0} for n in range(20)])},
            "test_split": "test",
            "doc_to_text": prompt,
            "doc_to_choice": ["right", "wrong"],
            "doc_to_target": "answer",
            "output_type": "multiple_choice",
            "num_fewshot": 0,
        }
    )


model, seen = Polite(), {}
for cached in (True, False):
    for prompt in ("{{question}}?", "{{question}}, please?"):
        found = lm_eval.simple_evaluate(model, tasks=[task(prompt)], cache_requests=cached, bootstrap_iters=0)
        assert found["configs"]["mine"]["doc_to_text"] == prompt
        seen[prompt, "cached" if cached else "not cached"] = (model.asked, found["results"]["mine"]["acc,none"])
print("what was asked first, and the accuracy, by prompt:", seen)
assert seen["{{question}}?", "cached"] == seen["{{question}}, please?", "cached"] == ("question 0?", 0.0), seen
assert seen["{{question}}, please?", "not cached"] == ("question 0, please?", 1.0), seen
PY
! grep -qiE "stale|cache.*(prompt|doc_to_text)" said || { cat said; exit 1; }
