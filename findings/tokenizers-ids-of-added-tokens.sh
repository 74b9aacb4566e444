#!/usr/bin/env bash
# tokenizers 0.23.3: the ids of added tokens in tokenizer.json are not what they are loaded with.
#
# Expected: a token has the id that stands beside it in the file, or loading it is an error.
# Seen: added tokens are numbered anew from the end of the vocabulary. Where one was taken out of the
#   file, all that follow it move down by one, onto each other's rows of the embedding; a gap before the
#   first one is closed too. Nothing is said, and save writes the new ids.
# So: leave a token in its place, under another name; and compare token_to_id with the file after loading.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3
venv/bin/python - <<'PY'
import json
from tokenizers import Tokenizer, models, pre_tokenizers
tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(10)}, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.add_special_tokens(["<|user|>", "<|tool|>", "<|end|>"])
whole = json.loads(tokenizer.to_str())
without = {**whole, "added_tokens": [own for own in whole["added_tokens"] if own["content"] != "<|tool|>"]}
moved = {**whole, "added_tokens": [{**own, "id": own["id"] + 22} for own in whole["added_tokens"]]}
seen = {}
for what, content in {"whole": whole, "without one": without, "from 32": moved}.items():
    loaded = Tokenizer.from_str(json.dumps(content))
    for own in content["added_tokens"]:
        seen[what, own["content"]] = own["id"], loaded.token_to_id(own["content"])
    again = json.loads(loaded.to_str())["added_tokens"]
    assert [own["id"] for own in again] == [loaded.token_to_id(own["content"]) for own in again]
print("id in the file, and as loaded:", seen)
assert seen["whole", "<|end|>"] == (12, 12)
assert seen["without one", "<|end|>"] == (12, 11)
assert seen["from 32", "<|end|>"] == (34, 12)
PY
