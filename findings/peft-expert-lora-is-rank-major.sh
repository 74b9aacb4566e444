#!/usr/bin/env bash
# peft 0.21.2: LoRA of a 3-D expert weight stores A by expert and B by rank.
#
# Expected: expert e has rows e·r to (e+1)·r of A and the same columns of B.
# Seen: A's rows are so; B's columns run over experts first: expert e has columns e, e + E, e + 2E,
#   … . Blocks give another update, of the right shape.
# So: B.reshape(out, r, E)[:, :, e], and A.reshape(E, r, in)[e].
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from peft import LoraConfig, get_peft_model
torch.manual_seed(0)
E, r = 3, 2
config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                       num_attention_heads=4, num_key_value_heads=2, num_local_experts=E)
model = MixtralForCausalLM(config)
before = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()  # (E, out, in)
wrapped = get_peft_model(model, LoraConfig(r=r, lora_alpha=r, target_modules=[], target_parameters=["experts.gate_up_proj"]))
parts = {}
for name, parameter in wrapped.named_parameters():
    if "lora_" in name:
        parameter.data = torch.randn_like(parameter) * 0.1
        parts["A" if "lora_A" in name else "B"] = parameter.detach().clone()
update = wrapped.merge_and_unload().model.layers[0].mlp.experts.gate_up_proj.detach() - before
A, B = parts["A"].reshape(E, r, -1), parts["B"]
by_rank = torch.stack([B.reshape(-1, r, E)[:, :, e] @ A[e] for e in range(E)])
by_block = torch.stack([B[:, e * r : (e + 1) * r] @ A[e] for e in range(E)])
seen = [float((x - update).norm() / update.norm()) for x in (by_rank, by_block)]
print("off, read by rank and by blocks:", seen)
assert seen[0] < 1e-5 and seen[1] > 0.5, seen
PY
