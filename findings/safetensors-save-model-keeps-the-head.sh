#!/usr/bin/env bash
# safetensors 0.8.0: save_model of a model with tied embeddings stores the head and leaves out the embedding.
#
# Expected: the embedding, as transformers' save_pretrained stores it.
# Seen: lm_head.weight is in the file and model.embed_tokens.weight is not. transformers loads it
#   all the same.
# So: a tool that looks for the embedding of a tied model looks under both names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
venv/bin/python - <<'PY'
import copy
import torch
from tiny_llama import AutoModelForCausalLM, LlamaForCausalLM, base, config, logits, off, tuned

from safetensors.torch import load_file, save_model
config.tie_word_embeddings = True
tied = LlamaForCausalLM(config)
save_model(tied, "w.safetensors")
tied.save_pretrained("folder")
pair = ("lm_head.weight", "model.embed_tokens.weight")
seen = [[name for name in pair if name in load_file(f)] for f in ("w.safetensors", "folder/model.safetensors")]
print("save_model stores", seen[0], "and save_pretrained", seen[1])
assert seen == [[pair[0]], [pair[1]]], seen
PY
