#!/usr/bin/env bash
# lycoris-lora 4.1.3: merging a LoHa adapter, or a LoKr of products, applies alpha/dim twice.
#
# Expected: merge_to(1.0) gives the weights that the network computes with.
# Seen: the merged update is (alpha/dim)² times the product of the factors, and the forward pass has
#   alpha/dim: at alpha = dim/2 half of the update is lost. LoCon and a LoKr of whole matrices merge right.
# So: merge_to(dim / alpha) for LoHa and for a LoKr with lokr_w1_a or lokr_w2_a.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 lycoris-lora==4.1.3 einops toml packaging safetensors==0.8.0 numpy==2.4.6
venv/bin/python - <<'PY'
import copy
import torch
from lycoris import LycorisNetwork, create_lycoris, create_lycoris_from_weights
from safetensors.torch import save_file
LycorisNetwork.apply_preset({"target_name": [".*"]})
inputs = torch.eye(32)
seen = {}
kinds = {"locon": {}, "lokr": {}, "lokr of products": {"factor": 2}, "loha": {}}
for kind, fields in kinds.items():
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(32, 48))
    model = copy.deepcopy(base)
    network = create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2.0, algo=kind.split()[0], **fields)
    network.apply_to()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        update = model(inputs) - base(inputs)
    save_file({k: v.contiguous() for k, v in network.state_dict().items()}, "adapter.safetensors")
    merged = copy.deepcopy(base)
    create_lycoris_from_weights(1.0, "adapter.safetensors", merged)[0].merge_to(1.0)
    with torch.no_grad():
        seen[kind] = round(float((merged(inputs) - base(inputs)).norm() / update.norm()), 3)
print("length of the merged update beside the network's:", seen)
assert seen == {"locon": 1.0, "lokr": 1.0, "lokr of products": 0.5, "loha": 0.5}, seen
PY
