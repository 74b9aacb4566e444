#!/usr/bin/env bash
# ctranslate2 4.8.5: a Llama with RoPE scaling of type "llama3" (3.1, 3.2, 3.3) is converted and computes as if it had none.
#
# Expected: the model's own numbers, as for "linear" scaling and for none; other types are refused by name.
# Seen: "llama3" is among the types that the converter takes. It hands on low_freq_factor and high_freq_factor, and the
#   factor itself only for "linear": it stays 1, and the logits are those of the same weights without scaling.
# So: compare logits of long texts after converting, or keep such models in another runtime.
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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = Tokenizer(models.BPE(vocab={f"w{number}": number for number in range(64)}, merges=[], unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=64)
kinds = {
    "none": None,
    "linear": dict(rope_type="linear", factor=8.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
}
right, found = {}, {}
for name, scaling in kinds.items():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_scaling=scaling)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 3  # so that positions count for something
        right[name] = model(torch.arange(4, 44)[None]).logits.numpy()
    model.save_pretrained(name)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2").save_pretrained(name)
    TransformersConverter(name).convert(f"{name}-converted")
    runner = ctranslate2.Generator(f"{name}-converted", device="cpu", compute_type="float32")
    found[name] = np.array(runner.forward_batch([[f"w{number}" for number in range(4, 44)]]))
def off(one, two):
    return round(float(np.linalg.norm(one - two) / np.linalg.norm(two)), 5)
seen = {name: off(found[name], right[name]) for name in kinds}
plain = off(found["llama3"], right["none"])
print("logits off from transformers':", seen, "llama3 beside the model without scaling:", plain)
assert max(seen["none"], seen["linear"], plain) < 0.0001 and seen["llama3"] > 0.01, (seen, plain)
PY
