#!/usr/bin/env bash
# ctranslate2 4.8.5: a Gemma 2 is converted and computes without its two soft caps.
#
# Expected: the model's own numbers, or a refusal.
# Seen: attn_logit_softcapping and final_logit_softcapping are read for no Gemma 2, whose config has 50 and 30: the converted
#   models give the numbers of the same weights with both set to None, and scores and perplexities are another model's.
# So: compare logits after converting. The caps count the more the larger the logits are.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 ctranslate2==4.8.5
venv/bin/python - <<'PY'
import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

words = Tokenizer(models.BPE(vocab={f"w{number}": number for number in range(64)}, merges=[], unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
             num_key_value_heads=2, query_pre_attn_scalar=8, max_position_embeddings=64, sliding_window=64,
             bos_token_id=1, eos_token_id=2, pad_token_id=3, attn_implementation="eager")
right, found = {}, {}
for name, caps in {"no caps": (None, None), "attention": (50.0, None), "logits": (None, 30.0), "both": (50.0, 30.0)}.items():
    torch.manual_seed(0)
    config = Gemma2Config(**sizes, attn_logit_softcapping=caps[0], final_logit_softcapping=caps[1])
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 40  # logits of tens, as Gemma's are
        right[name] = model(torch.arange(4, 44)[None]).logits.numpy()
    model.save_pretrained(name)
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(name)
    TransformersConverter(name).convert(f"{name}-converted")
    runner = ctranslate2.Generator(f"{name}-converted", device="cpu", compute_type="float32")
    found[name] = np.array(runner.forward_batch([[f"w{number}" for number in range(4, 44)]]))
def off(one, two):
    return round(float(np.linalg.norm(one - two) / np.linalg.norm(two)), 5)
seen = {name: (off(found[name], right[name]), off(found[name], right["no caps"])) for name in right}
print("converted models' logits off from transformers', and from those of the model without caps:", seen)
assert max(plain for _, plain in seen.values()) < 0.0001, seen
assert seen["no caps"][0] < 0.0001 and all(seen[name][0] > 0.01 for name in ("attention", "logits", "both")), seen
PY
