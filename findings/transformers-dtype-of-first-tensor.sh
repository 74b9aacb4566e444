#!/usr/bin/env bash
# transformers 5.23.0: one tensor of a mixed checkpoint decides the dtype of the whole model.
#
# Expected: from_pretrained without dtype keeps each tensor's dtype, or takes the widest.
# Seen: a model all of float32, whose lm_head alone is bfloat16, is loaded in bfloat16: every weight
#   is rounded without a word. With the head alone in float32 it is loaded in float32.
# So: a merge or a training script that keeps one tensor in another dtype must write dtype into
#   config.json.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
venv/bin/python - <<'PY'
import copy
import torch
from tiny_llama import AutoModelForCausalLM, LlamaForCausalLM, base, config, logits, off, tuned

import json, pathlib
from safetensors.torch import save_file
seen = {}
for name, head in {"bfloat16 head": torch.bfloat16, "float32 head": torch.float32}.items():
    other = torch.float32 if head == torch.bfloat16 else torch.bfloat16
    folder = pathlib.Path(name)
    base.save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text())
    del stated["dtype"]
    (folder / "config.json").write_text(json.dumps(stated))
    weights = {k: v.to(head if k == "lm_head.weight" else other) for k, v in base.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    seen[name] = {str(p.dtype) for p in AutoModelForCausalLM.from_pretrained(folder).parameters()}
    print(name, "and all else", other, "is loaded as", seen[name])
assert seen == {"bfloat16 head": {"torch.bfloat16"}, "float32 head": {"torch.float32"}}, seen
PY
