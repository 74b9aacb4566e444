#!/usr/bin/env bash
# transformers 5.23.0: the rows that resize_token_embeddings draws for new tokens are all but one vector.
#
# Expected: rows as different as those of other tokens: it says that they are drawn from a normal distribution that has the old
#   rows' mean and covariance.
# Seen: the covariance is multiplied by a billionth: rows spread about the mean 3e-5 as far as the old ones do. Ten new tokens are
#   ten times the same input, and their logits are the same to five digits; in bfloat16 they are one number. A beam or a sampler
#   takes any of them, and in what an expert learns of its new tokens all start from one place.
# So: mean_resizing=False draws rows as an untrained model has them; or set them from the tokens that they replace.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import copy

import torch
from tiny_llama import base, logits

seen = {}
for name, dtype, settings in (
    ("float32", torch.float32, {}),
    ("bfloat16", torch.bfloat16, {}),
    ("float32, mean_resizing=False", torch.float32, {"mean_resizing": False}),
):
    torch.manual_seed(0)
    model = copy.deepcopy(base).to(dtype)
    model.resize_token_embeddings(74, **settings)
    rows = model.get_input_embeddings().weight.data.double()
    given = logits(model)[0, -1].double()
    seen[name] = {
        "rows": float(rows[64:].std(0).mean() / rows[:64].std(0).mean()),
        "logits": float(given[64:].std() / given[:64].std()),
    }
print("how far ten new tokens spread, beside the old ones:", seen)
assert seen["float32"]["rows"] < 1e-3 and seen["float32"]["logits"] < 1e-3, seen
assert seen["bfloat16"]["rows"] < 0.02 and seen["bfloat16"]["logits"] < 1e-3, seen
assert seen["float32, mean_resizing=False"]["rows"] > 0.5, seen
PY
grep -q "mean and covariance" log
