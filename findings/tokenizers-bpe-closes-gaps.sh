#!/usr/bin/env bash
# tokenizers 0.23.3: BPE without an unknown token drops characters that it lacks, and merges what stood at their sides.
#
# Expected: an error, as Unigram and WordPiece give for such a text.
# Seen: "axb" gives the one token "ab": x is gone, and a and b are merged over the gap. "xyz" gives no token.
#   A model is then fed another text than the one it is scored on. Its perplexity a character counts
#   characters that it never saw. The offsets hide it: those of "axb" are those of "ab".
# So: compare decode(encode(text)) with the text, or give the model an unknown token.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
from tokenizers import Tokenizer, models

vocabulary = {"a": 0, "b": 1, "ab": 2}
found = {
    "bpe": Tokenizer(models.BPE(vocabulary, [("a", "b")])),
    "bpe with unk": Tokenizer(models.BPE({**vocabulary, "?": 3}, [("a", "b")], unk_token="?")),
    "unigram": Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)])),
    "wordpiece": Tokenizer(models.WordPiece(vocabulary, unk_token="?")),
}
seen = {}
for name, one in found.items():
    for text in ("axb", "xyz"):
        try:
            encoded = one.encode(text)
            seen[name, text] = encoded.tokens, encoded.offsets
        except Exception as error:
            seen[name, text] = str(error)
print("tokens and offsets:", seen)
assert seen["bpe", "axb"] == (["ab"], [(0, 2)]), seen
assert seen["bpe", "xyz"] == ([], []) and seen["bpe with unk", "axb"][0] == ["a", "?", "b"], seen
assert all("unk" in seen[name, "axb"].lower() for name in ("unigram", "wordpiece")), seen
PY
[ ! -s said ] || { cat said; exit 1; }
