#!/usr/bin/env bash
# transformers 5.23.0: what tokenizer.json says of cutting texts is dropped where tokenizer_class names a known class.
#
# Expected: that tokenizer.json is the tokenizer, as it was in 4.57.1 whatever class was named.
# Seen: GPT2Tokenizer, Qwen2Tokenizer or GPTNeoXTokenizer take vocabulary and merges of the file, and normalizer and
#   pre_tokenizer of the class: a tokenizer that lowers letters and cuts numbers into digits does neither. No warning.
# So: "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json (both releases then take the file), or
#   compare tokenizers.Tokenizer.from_file with what AutoTokenizer gives.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in old new; do python3 -m venv $name; done
old/bin/pip install --quiet transformers==4.57.1
new/bin/pip install --quiet transformers==5.23.0 tokenizers==0.23.3
cat > cut.py <<'PY'
import json
import os
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocab = {piece: number for number, piece in enumerate([*letters, "12", "<|endoftext|>"])}
made = Tokenizer(models.BPE(vocab, [("1", "2")]))
made.normalizer = normalizers.Lowercase()
made.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
seen = {}
for name in ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast"):
    os.makedirs(name, exist_ok=True)
    made.save(f"{name}/tokenizer.json")
    with open(f"{name}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": name, "eos_token": "<|endoftext|>"}, file)
    seen[name] = transformers.AutoTokenizer.from_pretrained(name).tokenize("A12")
print(transformers.__version__, "file:", made.encode("A12").tokens, "loaded:", seen)
kept = {name for name, found in seen.items() if found == made.encode("A12").tokens}
if transformers.__version__.startswith("4."):
    assert kept == set(seen), kept
else:
    assert kept == {"PreTrainedTokenizerFast"}, kept
PY
old/bin/python cut.py
new/bin/python cut.py
