#!/usr/bin/env bash
# optimum-quanto 0.2.7 with transformers 5.23.0: quantize of a Mixtral to 4 bits leaves its experts as they are.
#
# Expected: a model of about a sixth of the size, as for a Llama, or a word on what was left out.
# Seen: transformers 5 holds all experts of a layer in one tensor of three axes. quantize looks for Linear modules and finds those
#   of attention: nine tenths of a Mixtral stay float32, and the file has 93 % of its size. A score after "quantising to 4 bits"
#   is that of the float experts.
# So: compare bytes before and after; the same weights loaded in 4.57.1, where each expert is three Linear modules, shrink.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 optimum-quanto==0.2.7
cat > sizes.py <<'PY'
import torch
from optimum.quanto import freeze, qint4, quantize
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

sizes = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}


def weighs(model):
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


seen = {}
for model in (LlamaForCausalLM(LlamaConfig(**sizes)), MixtralForCausalLM(MixtralConfig(num_local_experts=8, **sizes))):
    before = weighs(model)
    quantize(model, weights=qint4)
    freeze(model)
    seen[type(model).__name__] = round(weighs(model) / before, 2)
print(seen["LlamaForCausalLM"], seen["MixtralForCausalLM"])
PY
new=$(venv/bin/python sizes.py 2> log) || { cat log; exit 1; }
venv/bin/pip install --quiet transformers==4.57.1
old=$(venv/bin/python sizes.py 2> log) || { cat log; exit 1; }
echo "size after quantising, Llama and Mixtral: transformers 5.23.0: $new, 4.57.1: $old"
python3 - $new $old <<'PY'
import sys

llama, mixtral, old_llama, old_mixtral = map(float, sys.argv[1:])
assert llama < 0.4 and old_llama < 0.4 and old_mixtral < 0.4 and mixtral > 0.85
PY
