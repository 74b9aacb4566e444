#!/usr/bin/env bash
# peft 0.20.0: biases that were trained with bias="lora_only" are not saved.
#
# Expected: the file to hold them, as it holds the factors.
# Seen: the adapter that comes back has the base's biases. Saving looks for first.bias, and the layer
#   inside the wrapper is called first.base_layer. Of 0.8.2, 0.11.1, 0.14.0, 0.16.0, 0.17.1 and 0.19.1
#   the same; 0.5.0 and 0.6.2 saved them, and 0.21.2 does.
# So: with these versions train with bias="all" or without biases, and look for bias in a file
#   before its training is deleted.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in lost saved; do python3 -m venv $name; done
lost/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.20.0
saved/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > biases.py <<'PY'
import torch
import peft
from safetensors import safe_open
net = torch.nn.Sequential(torch.nn.Linear(12, 8))
model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"], bias="lora_only"))
(trained,) = [name for name, own in model.named_parameters() if own.requires_grad and "bias" in name]
model.save_pretrained("adapter")
with safe_open("adapter/adapter_model.safetensors", "pt") as file:
    print(sum("bias" in name for name in file.keys()))
PY
before=$(lost/bin/python biases.py)
after=$(saved/bin/python biases.py)
echo "biases in the file: $before by 0.20.0, $after by 0.21.2"
test "$before" = 0 && test "$after" = 1
