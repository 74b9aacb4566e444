#!/usr/bin/env bash
# tokenizers 0.23.3: tokens added to a vocabulary with holes get ids that are taken.
#
# Expected: a new token gets an id that no token has.
# Seen: the first one gets the number of tokens as its id, and the next ones count on from there. In a
#   vocabulary of ids 0 to 8 and 12 the third gets 12, which a word has already: both are encoded as 12, and
#   decode gives the added one for both. get_vocab_size says 15, where the largest id is 14, as if all were
#   well.
# So: fill the holes of a vocabulary with names of their own before adding to it, and size an embedding by
#   the largest id plus one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3
venv/bin/python - <<'PY'
from tokenizers import Tokenizer, models, pre_tokenizers
words = {**{f"w{n}": n for n in range(9)}, "last": 12}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
size = tokenizer.get_vocab_size()
added = tokenizer.add_tokens([f"<{n}>" for n in range(5)])
given = [tokenizer.token_to_id(f"<{n}>") for n in range(5)]
print(f"{size} tokens up to id 12; {added} were added, and have the ids {given}")
encoded = tokenizer.encode("last <2>").ids
print("'last' and '<2>' are", encoded, "and back:", tokenizer.decode(encoded))
print("get_vocab_size:", tokenizer.get_vocab_size(), "largest id:", max(tokenizer.get_vocab().values()))
assert given == [10, 11, 12, 13, 14], given
assert encoded == [12, 12] and tokenizer.decode(encoded) == "<2> <2>"
assert tokenizer.get_vocab_size() == 15
PY
