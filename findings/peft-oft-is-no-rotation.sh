#!/usr/bin/env bash
# peft 0.21.2: an OFT adapter with the settings that it is given by default is no orthogonal matrix once it has moved far.
#
# Expected: orthogonal fine-tuning turns the inputs of a layer: the singular values of its weight stay what they are.
# Seen: use_cayley_neumann is on by default, and puts five terms of a series in the place of the inverse in Cayley's map. The
#   series has no limit where the skew matrix is longer than 1: of entries near 0.1 the "rotation" has singular values down to
#   0.8, of 0.2 from 0.2 to 2, of 0.3 up to 15, and it is merged so. With use_cayley_neumann=False all are 1.
# So: train with use_cayley_neumann=False, or look at the singular values before an OFT adapter is merged or averaged as one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy

import torch
from tiny_llama import base

from peft import OFTConfig, get_peft_model

seen = {}
for series in (True, False):
    for size in (0.02, 0.1, 0.2, 0.3):
        settings = {} if series else {"use_cayley_neumann": False}
        model = get_peft_model(copy.deepcopy(base), OFTConfig(oft_block_size=16, target_modules=["q_proj"], **settings))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "oft_" in name:
                parameter.data = size * torch.randn_like(parameter)
        turned = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight.double()
        before = base.model.layers[0].self_attn.q_proj.weight.double()
        values = torch.linalg.svdvals(torch.linalg.solve(before, turned))
        seen[series, size] = [round(float(values.min()), 2), round(float(values.max()), 2)]
print("least and greatest singular value of the matrix that was merged in, by series or inverse, and size:", seen)
assert seen[True, 0.02] == [1, 1] and all(seen[False, size] == [1, 1] for size in (0.02, 0.1, 0.2, 0.3)), seen
assert seen[True, 0.1][0] < 0.9 and seen[True, 0.2][0] < 0.5 and seen[True, 0.3][1] > 3, seen
PY
