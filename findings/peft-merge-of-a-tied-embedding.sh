#!/usr/bin/env bash
# peft 0.21.2: merge_and_unload of a LoRA on the embedding of a tied model changes the head too.
#
# Expected: a model that computes what the adapter computes on its base.
# Seen: the one shared weight gets the update, so the head has it as well, which the adapter never
#   trained: the logits of a tied Llama are off by more than the adapter does. The untied Llama is
#   right.
# So: untie the model before it is merged (a head of its own, tie_word_embeddings false), or keep
#   the adapter unmerged.
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
for tied in (False, True):
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).eval()
    model = tuned(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["embed_tokens"])))
    right = logits(model)
    seen["tied" if tied else "untied"] = off(logits(model.merge_and_unload()), right)
print("outputs after merge_and_unload are off by:", seen)
assert seen["untied"] < 1e-4 and seen["tied"] > 0.5, seen
PY
