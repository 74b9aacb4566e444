#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter(combination_type='linear') of two adapters is not the weighted sum of their updates.
#
# Expected: w₁Δ₁ + w₂Δ₂, as the name and the weights say.
# Seen: (√w₁B₁ + √w₂B₂)(√w₁A₁ + √w₂A₂): the cross terms B₁A₂ and B₂A₁ come in, here 90 % of the
#   mean's length. 'cat' is exact; 'svd' without svd_rank keeps the larger rank of the two.
# So: combination_type='cat', or 'svd' with svd_rank the sum of the ranks.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
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

from peft import LoraConfig, get_peft_model
make = lambda: LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
model = get_peft_model(copy.deepcopy(base), make(), adapter_name="a")
model.add_adapter("b", make())
tuned(model)
layer = model.base_model.model.model.layers[0].self_attn.q_proj
mean = (layer.get_delta_weight("a") + layer.get_delta_weight("b")) / 2
seen = {}
for how in ("linear", "cat", "svd"):
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], how, combination_type=how)
    seen[how] = float((layer.get_delta_weight(how) - mean).norm() / mean.norm())
print("distance from the mean of the updates:", seen)
assert seen["linear"] > 0.5 and seen["cat"] < 1e-6 and seen["svd"] > 0.2, seen
PY
