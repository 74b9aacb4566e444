#!/usr/bin/env bash
# peft 0.21.2: B·A of a saved PiSSA adapter is not its update of the base.
#
# Expected: W = W₀ + (alpha/r)·B·A, as of every LoRA file.
# Seen: the adapter was trained beside a base from which the leading singular parts were taken. PEFT
#   takes them away again when it loads the file; by the formula the weights are off by far more
#   than the training changed.
# So: convert it when it is saved (save_pretrained with path_initial_model_for_weight_conversion),
#   which writes twice the rank.
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

import json
from safetensors.torch import load_file
from peft import LoraConfig, get_peft_model
model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, lora_alpha=4, init_lora_weights="pissa", target_modules=["q_proj"]))
tuned(model, 1e-3)
model.save_pretrained("adapter")
merged = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight.detach()
before = base.model.layers[0].self_attn.q_proj.weight.detach()
file = load_file("adapter/adapter_model.safetensors")
key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
formula = before + file[key.format("B")] @ file[key.format("A")]
trained, error = float((merged - before).norm()), float((formula - merged).norm())
print("training changed the weights by", trained, "and the formula is off by", error)
assert json.load(open("adapter/adapter_config.json"))["init_lora_weights"] == "pissa"
assert error > 5 * trained
PY
