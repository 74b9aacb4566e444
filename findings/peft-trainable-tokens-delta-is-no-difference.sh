#!/usr/bin/env bash
# peft 0.21.2: the tensor trainable_tokens_delta holds new rows of the embedding, not differences.
#
# Expected: a tensor named delta is added to the base's rows.
# Seen: an untrained adapter's trainable_tokens_delta is equal to the base's rows of these tokens;
#   they replace the rows.
# So: subtract the base's rows before such tensors are averaged, scaled or added.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - <<'PY'
import copy
from safetensors.torch import load_file
from peft import LoraConfig, get_peft_model
from tiny_llama import base, torch
tokens = [3, 5]
config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": tokens})
get_peft_model(copy.deepcopy(base), config).save_pretrained("adapter")
stored = load_file("adapter/adapter_model.safetensors")
(delta,) = [tensor for name, tensor in stored.items() if name.endswith("trainable_tokens_delta")]
rows = base.model.embed_tokens.weight.detach()[tokens]
print("norm of the delta of an adapter that was not trained:", float(delta.norm()), "and of the base's rows:", float(rows.norm()))
assert torch.equal(delta, rows) and rows.norm() > 0
PY
