#!/usr/bin/env bash
# lycoris-lora 4.1.3: (IA)³ adapters, and DoRA by inputs (wd_on_output=False), are saved and cannot be loaded.
#
# Expected: create_lycoris_from_weights loads every file that save_weights wrote.
# Seen: it raises TypeError for ia3 and RuntimeError for locon with dora_wd and wd_on_output=False; locon loads.
# So: such files can be merged by no release of their own library; their tensors say all that is needed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 lycoris-lora==4.1.3 einops toml packaging safetensors==0.8.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from lycoris import LycorisNetwork, create_lycoris, create_lycoris_from_weights
LycorisNetwork.apply_preset({"target_name": [".*"]})
seen = {}
for name, fields in {
    "locon": {"algo": "locon"},
    "ia3": {"algo": "ia3"},
    "dora by inputs": {"algo": "locon", "dora_wd": True, "wd_on_output": False},
}.items():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48))
    network = create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2.0, **fields)
    network.apply_to()
    network.save_weights("adapter.safetensors", torch.float32, {})
    try:
        create_lycoris_from_weights(1.0, "adapter.safetensors", torch.nn.Sequential(torch.nn.Linear(32, 48)))
        seen[name] = "loads"
    except Exception as error:
        seen[name] = type(error).__name__
print(seen)
assert seen == {"locon": "loads", "ia3": "TypeError", "dora by inputs": "RuntimeError"}, seen
PY
