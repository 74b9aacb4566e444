#!/usr/bin/env bash
# torch 2.13.0: load_state_dict(assign=True) unties a tied head, and from a safetensors file leaves it as it was.
#
# Expected: assign as a load that copies nothing, the same model after it.
# Seen: the embedding becomes the file's tensor and the head stays the parameter that it was: a file that holds
#   tied weights once, as safetensors files do, leaves a head of random numbers, and strict=False says only that it
#   is missing, as it does where copying loads it. A whole state_dict gives two parameters that an optimiser moves apart.
# So: tie again after the load (transformers: model.tie_weights()).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from safetensors.torch import load_file, save_file


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


torch.manual_seed(0)
trained = Tied()
save_file({"embedding.weight": trained.embedding.weight.detach()}, "model.safetensors")
seen = {}
for assign in (False, True):
    model = Tied()
    told = model.load_state_dict(load_file("model.safetensors"), strict=False, assign=assign)
    seen[assign] = torch.equal(model.head.weight, trained.embedding.weight)
    print(f"assign={assign}: missing {told.missing_keys}, the head is the trained one: {seen[assign]}")
assert seen == {False: True, True: False}, seen
model = Tied()
model.load_state_dict(trained.state_dict(), assign=True)
print("parameters after a whole state_dict is assigned:", len(list(model.parameters())), "and before:", len(list(Tied().parameters())))
assert len(list(model.parameters())) == 2 and len(list(Tied().parameters())) == 1
PY
