#!/usr/bin/env bash
# transformers 5.23.0: a float16 T5 that is loaded and saved has a third of its feed-forward weights in float32.
#
# Expected: the file that was loaded.
# Seen: the weights called wo are float32 after loading and in the new file, whose config.json still says
#   float16. In bfloat16 nothing changes.
# So: compare and merge T5 checkpoints by values and not by dtypes; say the output's dtype.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
venv/bin/python - <<'PY'
import json

import torch
from safetensors.torch import load_file
from transformers import T5Config, T5ForConditionalGeneration

sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
whole = T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj="gated-gelu"))
seen = {}
for dtype in (torch.float16, torch.bfloat16):
    whole.to(dtype).save_pretrained("first")
    T5ForConditionalGeneration.from_pretrained("first").save_pretrained("again")
    first, again = (load_file(f"{folder}/model.safetensors") for folder in ("first", "again"))
    assert {own.dtype for own in first.values()} == {dtype}
    assert json.load(open("again/config.json"))["dtype"] == str(dtype).removeprefix("torch.")
    seen[str(dtype)] = sorted({name.split(".")[-2] for name, own in again.items() if own.dtype != dtype})
print("float32 in what was saved again:", seen)
assert seen == {"torch.float16": ["wo"], "torch.bfloat16": []}, seen
PY
