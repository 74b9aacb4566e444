#!/usr/bin/env bash
# peft 0.21.2: convert_to_lora of a DoRA adapter loses its magnitudes, and of one with lora_bias=True its biases.
#
# Expected: at full rank the same model, as for LoHa, or an error, as for bias="all".
# Seen: what is factored is B·A alone. Converted at full rank, the DoRA adapter here differs from the trained one by as much as that
#   changes at all; with lora_bias=True the trained biases of the layers are gone. Nothing is said, and both come out as plain LoRA.
# So: merge such an adapter into its base, and factor the difference of both weights.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import copy

import torch
from peft import LoHaConfig, LoraConfig, convert_to_lora, get_peft_model, set_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True)).eval()
targets = dict(target_modules=["q_proj", "v_proj"])
kinds = {
    "LoHa": LoHaConfig(**targets),
    "LoRA": LoraConfig(**targets),
    "DoRA": LoraConfig(**targets, use_dora=True),
    "lora_bias": LoraConfig(**targets, lora_bias=True),
}
tokens = torch.arange(1, 20)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


off = {}
for name, config in kinds.items():
    trained = get_peft_model(copy.deepcopy(base), config)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    lora, factors = convert_to_lora(trained, rank=32)  # 32: the full rank
    converted = get_peft_model(copy.deepcopy(base), lora)
    assert not set_peft_model_state_dict(converted, factors).unexpected_keys
    right = logits(trained)
    off[name] = round(float((logits(converted) - right).norm() / (right - logits(base)).norm()), 3)
print("error of the converted adapter, over the effect of the trained one:", off)
assert off["LoHa"] < 0.001 and off["LoRA"] < 0.001, off
assert off["DoRA"] > 0.5 and off["lora_bias"] > 0.2, off
PY
