#!/usr/bin/env bash
# transformers 5.23.0: a pad token that stands only in tokenizer_config.json gets a number past the vocabulary.
#
# Expected: an error or a warning, or the token that the vocabulary has in this place.
# Seen: the tokenizer adds the token with the next free number, and says nothing. Padding then
#   gives a number that the embedding has no row for.
# So: compare len(tokenizer) with the rows of the embedding after loading, and name a token that
#   tokenizer.json has.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
venv/bin/python - <<'PY'
import json
import pathlib
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
words = {"[UNK]": 0, "[PAD]": 1, **{f"w{n}": n for n in range(2, 64)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
seen = {}
for pad in ("[PAD]", "<pad>"):
    folder = pathlib.Path("right" if pad in words else "other")
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = AutoTokenizer.from_pretrained(folder)
    seen[pad] = len(loaded), loaded(["w5 w6", "w7"], padding=True).input_ids[1]
print("tokens, and a padded row, by pad_token (the vocabulary has 64):", seen)
assert seen == {"[PAD]": (64, [7, 1]), "<pad>": (65, [7, 64])}, seen
PY
