#!/usr/bin/env bash
# transformers 5.23.0: of a tensor that lies in two shards the last file wins, whatever the index says.
#
# Expected: the file that weight_map of model.safetensors.index.json names.
# Seen: with the index pointing at either file, the tensor of the one whose name sorts last is
#   loaded.
# So: an older copy of a tensor must leave its shard; an overlay that is to win needs a name that
#   sorts last.
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
key = "lm_head.weight"
seen = {}
for named in ("a.safetensors", "b.safetensors"):
    folder = pathlib.Path(f"index-names-{named[0]}")
    base.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    weights = base.state_dict()
    save_file({**weights, key: torch.full_like(weights[key], 1.0)}, folder / "a.safetensors", {"format": "pt"})
    save_file({key: torch.full_like(weights[key], 2.0)}, folder / "b.safetensors", {"format": "pt"})
    places = {name: "a.safetensors" for name in weights} | {key: named}
    if named[0] == "a":
        places["model.norm.weight"] = "a.safetensors"
        save_file({key: torch.full_like(weights[key], 2.0), "other": torch.ones(1)}, folder / "b.safetensors", {"format": "pt"})
        places["other"] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    seen[named] = float(AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.detach()[0, 0])
print("the index names a or b, and loaded is (1 is a, 2 is b):", seen)
assert seen == {"a.safetensors": 2.0, "b.safetensors": 2.0}, seen
PY
