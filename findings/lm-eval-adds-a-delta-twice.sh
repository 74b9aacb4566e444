#!/usr/bin/env bash
# lm-eval 0.4.13: the argument delta adds the difference of a tied embedding twice.
#
# Expected: base + delta is the expert that the delta was taken of.
# Seen: without tied embeddings it is. With them the embedding stands in the state dict as the head too,
#   both are one tensor, and it gets the difference twice: the model that is scored is none of anybody's.
# So: store the sum, and score it as a model of its own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 'lm-eval[hf]==0.4.13'
venv/bin/python - <<'PY'
import copy

import torch
from lm_eval.models.huggingface import HFLM
from tiny_llama import LlamaForCausalLM, config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
seen = {}
for tied in (False, True):
    own = copy.deepcopy(config)
    own.tie_word_embeddings = tied
    base, expert = LlamaForCausalLM(own), LlamaForCausalLM(own)
    difference = copy.deepcopy(expert)
    with torch.no_grad():
        for parameter, before in zip(difference.parameters(), base.parameters()):
            parameter -= before
    base.save_pretrained(f"base-{tied}")
    difference.save_pretrained(f"delta-{tied}")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2").save_pretrained(f"base-{tied}")
    found = HFLM(pretrained=f"base-{tied}", delta=f"delta-{tied}", device="cpu", dtype="float32").model.state_dict()
    times = {}
    for name, delta in difference.state_dict().items():
        if delta.any():
            times[name] = round(float(((found[name] - base.state_dict()[name]) * delta).sum() / delta.square().sum()), 3)
    seen[tied] = {name: number for name, number in times.items() if number != 1.0}
print("differences that were not added once, without and with tied embeddings:", seen)
assert seen == {False: {}, True: {"model.embed_tokens.weight": 2.0, "lm_head.weight": 2.0}}, seen
PY
