#!/usr/bin/env bash
# mergekit 0.1.5: of a weight that goes from 1 at the first layer to 0 at the last the head and the last norm get 1 again.
#
# Expected: a list of values runs through the network: the embedding has the first, what stands after the last layer the last.
# Seen: layers are interpolated, and whatever lies outside of them has the first value, before and behind alike. With [1, 0] for
#   one model and [0, 1] for the other the last layer is all the second's, and its outputs go through the norm and the head of
#   the first.
# So: give the head a filter of its own: {filter: lm_head, value: 0}, {filter: model.norm, value: 0}, then the list.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6 transformers==5.23.0
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import copy
from pathlib import Path

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
from safetensors.torch import load_file
from tiny_llama import LlamaForCausalLM, config

config = copy.deepcopy(config)
config.num_hidden_layers = 3
for name in ("first", "second"):
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(name)
weights = {"first": [1, 0], "second": [0, 1]}
models = [{"model": str(Path(name).absolute()), "parameters": {"weight": value}} for name, value in weights.items()]
recipe = {"merge_method": "linear", "dtype": "float32", "models": models}
run_merge(MergeConfiguration.model_validate(recipe), "merged", MergeOptions(copy_tokenizer=False))
first, second, merged = (load_file(f"{name}/model.safetensors") for name in ("first", "second", "merged"))
seen = {}
for name, tensor in merged.items():
    way = second[name] - first[name]
    part = ("layer " + name.split(".")[2]) if ".layers." in name else name.removeprefix("model.")
    seen.setdefault(part, set()).add(round(1 - float(((tensor - first[name]) * way).sum() / way.square().sum()), 2))
print("the part of the first model, by layer:", seen)
assert [seen[f"layer {number}"] for number in range(3)] == [{1.0}, {0.5}, {0.0}], seen
assert seen["embed_tokens.weight"] == seen["norm.weight"] == seen["lm_head.weight"] == {1.0}, seen
PY
