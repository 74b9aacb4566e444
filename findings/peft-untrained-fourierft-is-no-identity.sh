#!/usr/bin/env bash
# peft 0.21.2: an untrained FourierFT adapter replaces what a narrow model gives by noise; an untrained C3A moves it too.
#
# Expected: an adapter that was not trained adds nothing, as those of LoRA, LoHa, LoKr, VeRA, DeLoRA and WaveFT with their defaults.
# Seen: init_weights=False is FourierFT's default and means a random spectrum, which scaling=150 multiplies: at a width of 256 the
#   update is 2.6 times as long as the weight, and the outputs are off by more than they are large. It falls with the width, to a
#   hundredth at 4096. C3A's are drawn as well. Experts of two seeds differ by that noise, and what is merged of them holds it.
# So: init_weights=True for both: it means zeros.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import copy

import torch
from tiny_llama import LlamaForCausalLM, config, logits

from peft import (
    C3AConfig, DeloraConfig, FourierFTConfig, LoHaConfig, LoKrConfig, LoraConfig, VeraConfig, WaveFTConfig, get_peft_model,
)

config = copy.deepcopy(config)
config.hidden_size = 256
base = LlamaForCausalLM(config).eval()
right = logits(base)
kinds = {
    "FourierFT": FourierFTConfig(target_modules=["v_proj"]),
    "FourierFT, init_weights=True": FourierFTConfig(target_modules=["v_proj"], init_weights=True),
    "C3A": C3AConfig(target_modules=["v_proj"], block_size=16),
    "C3A, init_weights=True": C3AConfig(target_modules=["v_proj"], block_size=16, init_weights=True),
}
for kind in (LoraConfig, LoHaConfig, LoKrConfig, VeraConfig, DeloraConfig):
    kinds[kind.__name__] = kind(target_modules=["v_proj"])
kinds["WaveFT"] = WaveFTConfig(target_modules=["v_proj"], n_frequency=100)
moved = {}
for name, settings in kinds.items():
    torch.manual_seed(0)
    given = logits(get_peft_model(copy.deepcopy(base), settings))
    moved[name] = round(float((given - right).norm() / right.norm()), 3)
lengths = {}
for width in (256, 4096):
    layer = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False))
    torch.nn.init.normal_(layer[0].weight, std=0.02)
    adapted = get_peft_model(layer, FourierFTConfig(target_modules=["0"])).base_model.model[0]
    with torch.no_grad():
        lengths[width] = round(float(adapted.get_delta_weight("default").norm() / adapted.get_base_layer().weight.norm()), 3)
print("outputs moved by untrained adapters:", moved, "and FourierFT's update beside the weight by width:", lengths)
drawn = {"FourierFT", "C3A"}
assert moved["FourierFT"] > 0.5 and moved["C3A"] > 0.005 and all(moved[name] == 0 for name in kinds.keys() - drawn), moved
assert lengths[256] > 1 and 0.001 < lengths[4096] < 0.1, lengths
PY
