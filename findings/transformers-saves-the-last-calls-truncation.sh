#!/usr/bin/env bash
# transformers 5.23.0 with tokenizers 0.23.3: save_pretrained of a tokenizer stores the truncation and padding of its last call.
#
# Expected: settings of a call last for that call, and two saves of one tokenizer are equal.
# Seen: tokenizer(texts, truncation=True, max_length=8, padding="max_length") sets them in the fast tokenizer, and tokenizer.json
#   gets them. transformers loads the folder and takes them off again at each call, so that nothing shows. Whatever reads the file
#   with tokenizers itself, as servers in Rust do, cuts every text to 8 tokens, and pads short ones up to them.
# So: call tokenizer.backend_tokenizer.no_truncation() and no_padding() before saving, or copy the base's tokenizer.json.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.23.0 tokenizers==0.23.3
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import json

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"unknown": 0, "pad": 1, **{f"w{number}": number for number in range(2, 50)}}, unk_token="unknown"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="unknown", pad_token="pad")
long, short = " ".join(f"w{number}" for number in range(2, 32)), "w2 w3"
seen = {}
for name in ("before", "after"):
    tokenizer.save_pretrained(name)
    plain, theirs = Tokenizer.from_file(f"{name}/tokenizer.json"), AutoTokenizer.from_pretrained(name)
    stored = json.load(open(f"{name}/tokenizer.json"))
    seen[name] = {
        "stored": [stored["truncation"] is not None, stored["padding"] is not None],
        "tokenizers": [len(plain.encode(text).ids) for text in (long, short)],
        "transformers": [len(theirs(text)["input_ids"]) for text in (long, short)],
    }
    tokenizer([long, short], truncation=True, max_length=8, padding="max_length")
print("before and after one call, truncation and padding, and tokens of a long and a short text:", seen)
assert seen["before"] == {"stored": [False, False], "tokenizers": [30, 2], "transformers": [30, 2]}, seen
assert seen["after"] == {"stored": [True, True], "tokenizers": [8, 8], "transformers": [30, 2]}, seen
PY
! grep -qiE "truncat|padding" said || { cat said; exit 1; }
