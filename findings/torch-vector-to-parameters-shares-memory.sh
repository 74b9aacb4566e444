#!/usr/bin/env bash
# torch 2.13.0: after vector_to_parameters the vector is the model's memory, and that of every model it is given to.
#
# Expected: that the numbers are copied, as load_state_dict copies them.
# Seen: parameters become views of the vector. A task vector that is added to it later changes the model, and two
#   models that are made of one vector train each other. A half-precision layer beside float32 ones is float32 after
#   parameters_to_vector and back.
# So: give each model vector.clone(), and cast the model again.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.manual_seed(0)
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
vector = parameters_to_vector(first.parameters()).detach().clone()
for model in (first, second):
    vector_to_parameters(vector, model.parameters())
before = first.weight.detach().clone()
vector += 1  # the next task vector, for the next model
moved = float((first.weight.detach() - before).mean())
second(torch.ones(4)).sum().backward()
torch.optim.SGD(second.parameters(), lr=1.0).step()
print("a number added to the vector moved the first model by", moved, "and training the second by", float((first.weight.detach() - before).mean()) - moved)
assert abs(moved - 1) < 1e-6 and torch.equal(first.weight, second.weight)
mixed = torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), torch.nn.LayerNorm(4))
vector_to_parameters(parameters_to_vector(mixed.parameters()), mixed.parameters())
print("a bfloat16 layer is", mixed[0].weight.dtype)
assert mixed[0].weight.dtype == torch.float32
PY
