#!/usr/bin/env bash
# peft 0.21.2 and lycoris-lora 4.1.3: the same LoKr factors and alpha are two updates.
#
# Expected: one rule for alpha and rank in the type's two implementations.
# Seen: where both factors are whole matrices, LyCORIS leaves alpha out (scale 1), and PEFT
#   multiplies by alpha / r of its config: here 0.001.
# So: a LoKr of whole matrices that is moved between them needs alpha = r in PEFT's config.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 lycoris-lora==4.1.3
venv/bin/python - <<'PY'
import copy
import torch
from torch import nn
from lycoris import LycorisNetwork, create_lycoris_from_weights
from peft import LoKrConfig, get_peft_model
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 16, bias=False))
config = LoKrConfig(target_modules=["0"], r=1000, alpha=1, init_weights=False)  # so large a rank leaves both factors whole
layer = get_peft_model(copy.deepcopy(net), config).base_model.model[0]
w1, w2 = layer.lokr_w1["default"].detach(), layer.lokr_w2["default"].detach()
product = torch.kron(w1, w2)
weights = {"lycoris_0.lokr_w1": w1, "lycoris_0.lokr_w2": w2, "lycoris_0.alpha": torch.tensor(1.0)}
LycorisNetwork.apply_preset({"target_module": ["Linear"]})
network, _ = create_lycoris_from_weights(1.0, None, copy.deepcopy(net), weights)
updates = {"peft": layer.get_delta_weight("default"), "lycoris": network.loras[0].get_diff_weight(1.0)[0]}
seen = {name: float((update.detach() * product).sum() / (product * product).sum()) for name, update in updates.items()}
print("the update in units of w1 x w2:", seen)
assert abs(seen["peft"] - 0.001) < 1e-6 and abs(seen["lycoris"] - 1) < 1e-4, seen
PY
