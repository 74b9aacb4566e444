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
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
venv/bin/python - <<'PY'
import copy, warnings
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
warnings.filterwarnings("ignore")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=False)
base = LlamaForCausalLM(config).eval()
tokens = torch.arange(10)[None]

def logits(model):
    with torch.no_grad():
        return model.eval()(tokens).logits

def off(is_, should):
    """The error, beside what the adapter does."""
    return float((is_ - should).norm() / (should - logits(base)).norm())

def tuned(model, size=0.1):
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data += size * torch.randn_like(parameter)
    return model

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
