#!/usr/bin/env bash
# peft 0.21.2: a LoRA on a convolution with padding_mode="circular", or with a dilation, is trained as another update than it is merged as.
#
# Expected: the merged layer gives what the layer with its adapter gave, as it does for zero padding.
# Seen: the convolution A of the adapter takes the kernel, stride and padding of its layer, and neither padding_mode
#   nor dilation. Training sees zeros at the border and a kernel without gaps; B·A is added to a kernel that has them.
#   With padding="same" the shapes agree and nothing is said.
# So: leave such layers out of target_modules, or compare outputs before and after merging.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

torch.manual_seed(0)
one, two = torch.randn(2, 4, 12), torch.randn(2, 4, 12, 12)
cases = {
    "zeros": (nn.Conv2d(4, 4, 3, padding=1), two),
    "circular": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), two),
    "reflect": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), two),
    "dilation": (nn.Conv1d(4, 4, 3, padding="same", dilation=2), one),
}
apart = {}
for name, (layer, given) in cases.items():
    net = nn.Sequential(layer)
    tuned = get_peft_model(copy.deepcopy(net), LoraConfig(target_modules=["0"], r=2))
    with torch.no_grad():
        for own, parameter in tuned.named_parameters():
            if "lora_B" in own:
                parameter.normal_()
        before = tuned(given)
        after = tuned.merge_and_unload()(given)
        apart[name] = round(float((after - before).norm() / (before - net(given)).norm()), 3)
print("merged beside unmerged, as parts of what the adapter does:", apart)
assert apart["zeros"] == 0 and min(apart["circular"], apart["reflect"]) > 0.1 and apart["dilation"] > 0.5, apart
PY
