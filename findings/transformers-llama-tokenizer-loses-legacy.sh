#!/usr/bin/env bash
# transformers 5.23.0: a Llama tokenizer with "legacy": true is another tokenizer after it was loaded and saved.
#
# Expected: save_pretrained writes what was loaded, as it does for other tokenizers.
# Seen: the loaded one puts ▁ before the text that follows a special token, as its files of transformers 4 say.
#   The saved folder has no "legacy" and another pipeline in tokenizer.json, and loaded again it puts none
#   there: <s>word is no longer the pieces that the model was trained on.
# So: copy a tokenizer's files instead of loading and saving them, or put "legacy": true back.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.23.0 tokenizers==0.23.3
venv/bin/python - <<'PY'
import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer

pieces = ["<unk>", "<s>", "</s>", "▁", "m", "e", "r", "g", "me", "▁me"]
words = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [("m", "e"), ("▁", "me")], unk_token="<unk>"))
words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
words.add_special_tokens(["<unk>", "<s>", "</s>"])
Path("first").mkdir()
words.save("first/tokenizer.json")
settings = {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
Path("first/tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": False}))


def cut(folder):
    return AutoTokenizer.from_pretrained(folder).tokenize("merge</s>merge")


AutoTokenizer.from_pretrained("first").save_pretrained("again")
print("loaded:           ", cut("first"))
print("saved, and loaded:", cut("again"))
saved = json.loads(Path("again/tokenizer_config.json").read_text())
assert cut("first") == words.encode("merge</s>merge").tokens
assert cut("first")[-4:] == ["▁me", "r", "g", "e"] and cut("again")[-4:] == ["me", "r", "g", "e"]
assert "legacy" not in saved
Path("again/tokenizer_config.json").write_text(json.dumps({**saved, "legacy": True}))
print("with legacy again:", cut("again"))
assert cut("again") == cut("first")
PY
