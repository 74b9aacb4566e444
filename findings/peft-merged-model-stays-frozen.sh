#!/usr/bin/env bash
# peft 0.21.2: merge_and_unload of an adapter with a trained head gives a model in which the head alone can be trained.
#
# Expected: a plain model, as before get_peft_model, all of whose parameters are trained in the next stage.
# Seen: the base's parameters stay frozen, and only what modules_to_save held has requires_grad. The next training runs, its loss
#   falls, since there is a head, and no other weight moves. Saved and loaded again, the same model trains in full. One
#   without a head fails at once, for want of a gradient.
# So: model.requires_grad_(True) after merge_and_unload or unload, or save and load before training on.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import torch
from tiny_llama import config
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from peft import LoraConfig, get_peft_model

config.pad_token_id = 0
start = LlamaForSequenceClassification(config)
given = {"input_ids": torch.arange(1, 33).reshape(8, 4), "labels": torch.arange(8) % 2}


def trained(model):
    """How many tensors move in ten steps, of how many, and whether the loss falls."""
    before = {name: own.detach().clone() for name, own in model.named_parameters()}
    steps = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = model(**given).loss
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    moved = [name for name, own in model.named_parameters() if not torch.equal(own, before[name])]
    return len(moved), len(before), losses[-1] < losses[0]


model = get_peft_model(start, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"]))
merged = model.merge_and_unload()
merged.save_pretrained("merged")
seen = {"merged": trained(merged), "saved and loaded": trained(AutoModelForSequenceClassification.from_pretrained("merged"))}
print("tensors that a training moves, of how many, and whether the loss falls:", seen)
assert seen["merged"] == (1, 21, True) and seen["saved and loaded"] == (21, 21, True), seen
PY
! grep -qiE "frozen|requires_grad" said || { cat said; exit 1; }
