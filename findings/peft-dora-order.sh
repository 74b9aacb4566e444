#!/usr/bin/env bash
# peft 0.21.2: two active DoRA adapters give other outputs in another order.
#
# Expected: set_adapter(['a', 'b']) and ['b', 'a'] are one model, as with LoRA.
# Seen: outputs differ by more than half of what the adapters do, unmerged and merged: each
#   adapter's magnitude is of a norm in which the ones before are not counted alike.
# So: an order belongs to a stack of DoRA adapters, or one at a time.
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
seen = {}
for dora in (False, True):
    make = lambda: LoraConfig(r=4, use_dora=dora, target_modules=["q_proj"])
    model = get_peft_model(copy.deepcopy(base), make(), adapter_name="a")
    model.add_adapter("b", make())
    tuned(model)
    outputs = []
    for order in (["a", "b"], ["b", "a"]):
        model.base_model.set_adapter(order)
        outputs.append(logits(model))
    seen["DoRA" if dora else "LoRA"] = off(outputs[1], outputs[0])
print("outputs in the other order are off by:", seen)
assert seen["LoRA"] < 1e-5 and seen["DoRA"] > 0.3, seen
PY
