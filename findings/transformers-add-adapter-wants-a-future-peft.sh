#!/usr/bin/env bash
# transformers 5.24.0 and peft 0.21.2, both the newest: add_adapter refuses this PEFT, and load_adapter takes it.
#
# Expected: two newest releases that pip installs together without complaint work together, or no adapter method works.
# Seen: model.add_adapter asks for PEFT 0.22.0, which was not released on 2026-12-01. load_adapter, from_pretrained of an
#   adapter's folder and PEFT's own classes work. So training stops, and what is trained already still loads.
# So: train through PEFT's get_peft_model, or pin transformers 5.23.0, where add_adapter takes PEFT 0.21.2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
venv/bin/pip check
venv/bin/python - <<'PY'
import copy
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
base = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                    num_attention_heads=2, num_key_value_heads=2))
base.save_pretrained("base")
base = AutoModelForCausalLM.from_pretrained("base")
config = LoraConfig(r=2, target_modules=["q_proj"])
get_peft_model(copy.deepcopy(base), config).save_pretrained("adapter")
PeftModel.from_pretrained(copy.deepcopy(base), "adapter")
print("PEFT's own classes: loaded")
copy.deepcopy(base).load_adapter("adapter")
AutoModelForCausalLM.from_pretrained("adapter")
print("load_adapter and from_pretrained: loaded")
try:
    copy.deepcopy(base).add_adapter(config)
except ValueError as error:
    print("add_adapter:", error)
    assert "0.22.0" in str(error), error
else:
    raise SystemExit("add_adapter works now")
PY
