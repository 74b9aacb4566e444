#!/usr/bin/env bash
# transformers 5.23.0: model.to(torch.bfloat16) and the same weights loaded in bfloat16 turn positions by other angles.
#
# Expected: one model: the weights are equal bit for bit.
# Seen: the cast takes the frequencies of the rotary embedding along, which no file holds: from_pretrained
#   makes them in float32. Within 4096 positions a cosine is off by more than 1, so that a model scored in memory
#   is not the one that was saved.
# So: cast by saving and loading with dtype=, or set rotary_emb.inv_freq again after the cast; score what was loaded.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
venv/bin/python - <<'PY'
import copy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

base = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2))
cast = copy.deepcopy(base).to(torch.bfloat16)
cast.save_pretrained("model")
loaded = LlamaForCausalLM.from_pretrained("model")
assert all(torch.equal(a, b) for a, b in zip(cast.parameters(), loaded.parameters(), strict=True))
at = torch.arange(4096)[None]
x = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
cosines = [model.model.rotary_emb(x, at)[0].float() for model in (cast, loaded)]
off = float((cosines[0] - cosines[1]).abs().max())
print("frequencies in", cast.model.rotary_emb.inv_freq.dtype, "and", loaded.model.rotary_emb.inv_freq.dtype)
print(f"the cosines of 4096 positions are off by up to {off:.2f}")
assert cast.model.rotary_emb.inv_freq.dtype != loaded.model.rotary_emb.inv_freq.dtype and off > 1, off
PY
