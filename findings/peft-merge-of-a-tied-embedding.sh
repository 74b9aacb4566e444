#!/usr/bin/env bash
# peft 0.21.2: merge_and_unload of a LoRA on the embedding of a tied model changes the head too.
#
# Expected: a model that computes what the adapter computes on its base.
# Seen: the one shared weight gets the update, so the head has it as well, which the adapter never
#   trained: the logits of a tied Llama are off by more than the adapter does. The untied Llama is
#   right.
# So: untie the model before it is merged (a head of its own, tie_word_embeddings false), or keep
#   the adapter unmerged.
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
from tiny_llama import AutoModelForCausalLM, LlamaForCausalLM, base, config, logits, off, tuned

from peft import LoraConfig, get_peft_model
seen = {}
for tied in (False, True):
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).eval()
    model = tuned(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["embed_tokens"])))
    right = logits(model)
    seen["tied" if tied else "untied"] = off(logits(model.merge_and_unload()), right, base)
print("outputs after merge_and_unload are off by:", seen)
assert seen["untied"] < 1e-4 and seen["tied"] > 0.5, seen
PY
