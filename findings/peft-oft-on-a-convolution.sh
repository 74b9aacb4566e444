#!/usr/bin/env bash
# peft 0.21.2: an untrained OFT adapter on a 3 x 3 convolution changes what the model gives, and merging it does not.
#
# Expected: an orthogonal adapter starts as the identity, and the merged kernel gives what the
#   adapter gives.
# Seen: the adapter unfolds the input into overlapping patches, rotates them, and adds them up
#   again, so each pixel is counted up to nine times. The merged kernel is a rotation of the
#   kernel. The two agree only where the window is 1 x 1.
# So: leave convolutions with a window out of target_modules of OFT; the merged model is not the
#   trained one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy
import torch
from torch import nn
from peft import OFTConfig, get_peft_model
torch.manual_seed(0)
seen = {}
for window, block in ((1, 4), (3, 6)):
    plain = nn.Sequential(nn.Conv2d(4, 4, window, padding=window // 2, bias=False))
    x = torch.randn(1, 4, 6, 6)
    adapted = get_peft_model(copy.deepcopy(plain), OFTConfig(target_modules=["0"], oft_block_size=block, r=0)).eval()
    with torch.no_grad():
        right, unmerged = plain(x), adapted(x)
        merged = adapted.merge_and_unload()(x)
    seen[window] = [float((y - right).norm() / right.norm()) for y in (unmerged, merged)]
print("off from the base, untrained adapter and merged, by window:", seen)
assert max(*seen[1], seen[3][1]) < 1e-5 and seen[3][0] > 1, seen
PY
