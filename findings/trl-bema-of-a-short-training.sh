#!/usr/bin/env bash
# trl 1.16.0: the averaged model that BEMACallback stores after a training of fewer than 400 steps is the model it started from.
#
# Expected: an average over the steps that were made, or a word that there were too few.
# Seen: update_freq is 400 by default, the average is touched at steps 400, 800 and so on, and saved as it stands: after 300 steps
#   the folder bema holds the start, bit for bit, and after 450 steps it knows nothing of the last 50. Nothing is said.
# So: set update_freq to a hundredth of the steps or less, and compare the saved model with the start.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 trl==1.16.0
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import copy

import torch
from tiny_llama import LlamaForCausalLM, base
from transformers import Trainer, TrainingArguments
from trl import BEMACallback

rows = [{"input_ids": torch.arange(start, start + 8), "labels": torch.arange(start, start + 8)} for start in range(32)]


def apart(one, other):
    return float(sum((a - b).square().sum() for a, b in zip(one.parameters(), other.parameters()))) ** 0.5


seen = {}
for steps, often in ((300, {}), (300, {"update_freq": 3}), (450, {})):
    model = copy.deepcopy(base)
    settings = TrainingArguments(
        "out", max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-3, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True,
    )
    Trainer(model, settings, train_dataset=rows, callbacks=[BEMACallback(**often)]).train()
    average = LlamaForCausalLM.from_pretrained("out/bema")
    seen[steps, *often.values()] = round(apart(average, base) / apart(model, base), 2)
print("how far the average is from the start, beside the trained model, by steps and update_freq:", seen)
assert seen[(300,)] == 0 and seen[(300, 3)] > 0.3 and 0.05 < seen[(450,)] < 0.9, seen
PY
! grep -qiE "bema" log || { cat log; exit 1; }
