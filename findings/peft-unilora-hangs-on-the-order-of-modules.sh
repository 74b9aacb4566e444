#!/usr/bin/env bash
# peft 0.21.2: a UniLoRA adapter's file holds one vector, and which number goes where is drawn anew from all modules at loading.
#
# Expected: an adapter names the modules that it changes, and a base that lacks one of them or has one
#   more is told of by missing or unexpected keys, as for LoRA.
# Seen: one tensor, unilora_theta_d, of 256 numbers. The places come from a generator over all
#   targeted modules in order. On a model with one more layer every update is another one, in the
#   layers that both models have as well, and loading warns of nothing (LoRA's loading does).
# So: save_indices=True, or compare an update before and after; such adapters cannot be merged tensor
#   by tensor, nor loaded on a pruned or deepened base.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy, warnings
from peft import LoraConfig, PeftModel, UniLoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_llama import LlamaForCausalLM, base, config, torch
deeper = LlamaForCausalLM(type(config)(**{**config.to_dict(), "num_hidden_layers": 3, "layer_types": None}))
deeper.load_state_dict(base.state_dict(), strict=False)
def update(model):
    """What the adapter adds to q_proj of the first layer."""
    merged = copy.deepcopy(model).merge_and_unload().model.layers[0].self_attn.q_proj.weight.detach()
    return merged - base.model.layers[0].self_attn.q_proj.weight.detach()
seen = {}
for name, kind, more in (("lora", LoraConfig, {"init_lora_weights": False}), ("unilora", UniLoraConfig, {}), ("unilora with indices", UniLoraConfig, {"save_indices": True})):
    torch.manual_seed(0)
    adapted = get_peft_model(copy.deepcopy(base), kind(r=4, target_modules=["q_proj"], **more))
    for key, parameter in adapted.named_parameters():
        if "theta_d" in key:
            parameter.data = 0.5 * torch.randn_like(parameter)
    adapted.save_pretrained(name)
    right = update(adapted)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = update(PeftModel.from_pretrained(copy.deepcopy(deeper), name))
    again = update(PeftModel.from_pretrained(copy.deepcopy(base), name))
    seen[name] = [len(load_file(f"{name}/adapter_model.safetensors")), float((again - right).norm() / right.norm()), float((there - right).norm() / right.norm()), sum("missing" in str(one.message) for one in said)]
print("tensors, q_proj off on the same base, on one with a layer more, warnings:", seen)
assert seen["lora"][0] == 4 and seen["lora"][2] < 1e-4 and seen["lora"][3] == 1, seen
assert seen["unilora"][0] == 1 and seen["unilora"][1] < 1e-4 and seen["unilora"][2] > 0.5 and seen["unilora"][3] == 0, seen
PY
