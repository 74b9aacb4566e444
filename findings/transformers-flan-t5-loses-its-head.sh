#!/usr/bin/env bash
# transformers 5.23.0: a T5 with a head of its own (Flan-T5, mT5) that it saved loads in 4.57.1 with the embedding for a head.
#
# Expected: a model with a head of its own, as its config said before and its file still holds.
# Seen: 5.23.0 writes "tie_word_embeddings": true for every T5 and mT5, and goes by the values: a head that differs
#   stays. 4.57.1 goes by the config: it ties the two, scales the output of T5, and drops the head without a warning.
# So: set "tie_word_embeddings" back to false in config.json after fine-tuning with 5; it reads that the same way.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in old new; do python3 -m venv $name; done
old/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==4.57.1
new/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
cat > head.py <<'PY'
import sys
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, MT5Config, T5Config
transformers.logging.set_verbosity_error()
sizes = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
ids = torch.arange(1, 11)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=ids, decoder_input_ids=ids).logits


def off(folder, right):
    found = logits(AutoModelForSeq2SeqLM.from_pretrained(folder))
    return float((found - right).norm() / right.norm())


for name, kind in (("t5", T5Config), ("mt5", MT5Config)):
    if sys.argv[1] == "make":
        torch.manual_seed(0)
        model = AutoModelForSeq2SeqLM.from_config(kind(**sizes, tie_word_embeddings=False))
        model.save_pretrained(f"{name}-old")
        torch.save(logits(model), f"{name}.pt")
        continue
    right = torch.load(f"{name}.pt")
    if sys.argv[1] == "save":
        AutoModelForSeq2SeqLM.from_pretrained(f"{name}-old").save_pretrained(f"{name}-new")
        seen = {folder: off(f"{name}-{folder}", right) for folder in ("old", "new")}
        print("5.23.0 is off by", name, seen)
        assert max(seen.values()) < 1e-4, seen
    else:
        seen = {folder: off(f"{name}-{folder}", right) for folder in ("old", "new")}
        print("4.57.1 is off by", name, seen)
        assert seen["old"] < 1e-4 and seen["new"] > 0.5, seen
PY
old/bin/python head.py make
new/bin/python head.py save
old/bin/python head.py load
