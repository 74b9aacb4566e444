#!/usr/bin/env bash
# loralib 0.1.2: a state_dict that was taken in eval mode holds the update twice: in the weight and beside it.
#
# Expected: eval() changes what layers do, not what is stored; a state_dict that loads without a word is the model.
# Seen: eval() adds B·A to the weight in place. Loaded into a new model the update counts twice, in train and in eval mode.
#   Factors that are loaded while a model is in eval mode do nothing there, and train() then takes them off the weight.
# So: call train() before saving and before loading, or make the layers with merge_weights=False.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 loralib==0.1.2
venv/bin/python - <<'PY'
import loralib
import torch

torch.manual_seed(0)
base, given = torch.nn.Linear(8, 8), torch.randn(3, 8)
def fresh():
    return loralib.Linear(8, 8, r=2, lora_alpha=4)
def update(layer):  # how many times the trained update is in what a layer gives
    return round(float(((layer(given) - base(given)) * whole).sum() / whole.square().sum()), 3)
with torch.no_grad():
    trained = fresh()
    trained.load_state_dict(base.state_dict(), strict=False)
    torch.nn.init.normal_(trained.lora_B)
    whole = trained(given) - base(given)
    seen = {"trained": update(trained)}
    trained.eval()
    seen["trained, eval"] = update(trained)
    loaded = fresh()
    print(loaded.load_state_dict(trained.state_dict()))
    seen["loaded"] = update(loaded)
    loaded.eval()
    seen["loaded, eval"] = update(loaded)
    late = fresh()
    late.load_state_dict(base.state_dict(), strict=False)
    late.eval()
    late.load_state_dict(loralib.lora_state_dict(trained), strict=False)
    seen["factors loaded in eval"] = update(late)
    late.train()
    seen["and trained on"] = update(late)
print("times the update is there:", seen)
assert list(seen.values()) == [1.0, 1.0, 2.0, 2.0, 0.0, 0.0], seen
PY
