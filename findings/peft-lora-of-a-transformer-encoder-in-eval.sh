#!/usr/bin/env bash
# peft 0.21.2: a LoRA on the feed-forward layers of torch's TransformerEncoder works while training and does nothing in eval mode.
#
# Expected: what was trained is what eval() computes, as for any other Linear.
# Seen: in eval mode the encoder takes torch's fast path, which reads linear1.weight and never calls the layer. PEFT's layer
#   shows its base's weight under that name, so the model gives the base's numbers to the last bit. Merged, it is right.
# So: merge before evaluating, or call torch.backends.mha.set_fastpath_enabled(False).
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

torch.manual_seed(0)
encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0), 2)
given = torch.randn(2, 5, 16)
with torch.no_grad():
    before = encoder.eval()(given)
    model = get_peft_model(encoder, LoraConfig(r=4, target_modules=["linear1", "linear2"], init_lora_weights=False))
    seen = {
        "train": model.train()(given),
        "eval": model.eval()(given),
        "eval, merged": copy.deepcopy(model).merge_and_unload().eval()(given),
    }
    torch.backends.mha.set_fastpath_enabled(False)
    seen["eval without the fast path"] = model.eval()(given)
moved = {name: round(float((found - before).norm()), 3) for name, found in seen.items()}
print("how far the adapter moves what the encoder gives:", moved)
assert torch.equal(seen["eval"], before) and moved["train"] > 1, moved
assert all(torch.allclose(seen[name], seen["train"], atol=1e-4) for name in seen if name != "eval"), moved
PY
