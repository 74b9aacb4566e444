#!/usr/bin/env bash
# transformers 5.23.0: shards that save_pretrained writes beside an older model.safetensors are never loaded.
#
# Expected: the model that was saved last, as save_pretrained removes old shards.
# Seen: it removes shards and not the single file, and from_pretrained takes the single file before the
#   index. A model that outgrew max_shard_size, or was saved again with a smaller one, loads as the older
#   model, with no warning. The other way round (shards first, then one file) the new one is loaded.
# So: save into an empty folder.
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
from tiny_llama import AutoModelForCausalLM, base, logits

newer = copy.deepcopy(base)
newer.lm_head.weight.data *= 2


def saved(folder, *models):
    for model, size in models:
        model.save_pretrained(folder, max_shard_size=size)
    found = logits(AutoModelForCausalLM.from_pretrained(folder))
    return "newer" if torch.equal(found, logits(newer)) else "older" if torch.equal(found, logits(base)) else "neither"


seen = {
    "one file, then shards": saved("a", (base, "1GB"), (newer, "20KB")),
    "shards, then one file": saved("b", (base, "20KB"), (newer, "1GB")),
}
print("what is loaded after", seen)
assert list(seen.values()) == ["older", "newer"], seen
PY
