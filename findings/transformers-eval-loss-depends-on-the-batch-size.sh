#!/usr/bin/env bash
# transformers 5.23.0: the eval_loss of a Trainer depends on the batch size as soon as texts differ in length.
#
# Expected: the mean over tokens, so that exp(eval_loss) is the perplexity, whatever per_device_eval_batch_size is.
# Seen: each batch gives the mean over its own tokens, and the batches are averaged by their rows. In batches of 1
#   a text of 3 tokens counts as much as one of 40. One model's exp(eval_loss) is 591 in batches of 1.
#   In one batch of 16 it is 3.1. A model that gives every word one chance has 64: the batch size decides
#   which of the two is better.
# So: compare eval_loss at one batch size and order alone, or sum losses and tokens oneself.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import copy
import math

import torch
from tiny_llama import base
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

draw = torch.Generator().manual_seed(0)
texts = [[7] * 40 for _ in range(4)] + [torch.randint(0, 64, (3,), generator=draw).tolist() for _ in range(12)]


def batched(rows):
    longest = max(len(row["labels"]) for row in rows)
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        key: torch.tensor([row[key] + [own] * (longest - len(row[key])) for row in rows])
        for key, own in filled.items()
    }


rows = [{"input_ids": text, "labels": text, "attention_mask": [1] * len(text)} for text in texts]
# one knows the long texts, which are one word again and again; one gives all words the same chance
repeats, uniform = copy.deepcopy(base), copy.deepcopy(base)
with torch.no_grad():
    for model in (repeats, uniform):
        model.lm_head.weight.zero_()
    repeats.model.embed_tokens.weight.copy_(torch.nn.functional.one_hot(torch.arange(64) % 32, 32) * 5.0)
    repeats.lm_head.weight[7] = 1.5
seen = {}
for name, model in (("repeats", repeats), ("uniform", uniform)):
    for size in (1, 16):
        arguments = TrainingArguments("out", per_device_eval_batch_size=size, report_to=[], use_cpu=True, disable_tqdm=True)
        trainer = Trainer(model, arguments, data_collator=batched, eval_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        seen[name, size] = round(math.exp(trainer.evaluate()["eval_loss"]), 1)
print("exp(eval_loss) by batch size:", seen)
assert seen["uniform", 1] == seen["uniform", 16] == 64.0, seen
assert seen["repeats", 1] > 300 and seen["repeats", 16] < 5, seen
PY
! grep -qiE "batch size|per token|weighted" said || { cat said; exit 1; }
