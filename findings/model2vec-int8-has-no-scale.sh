#!/usr/bin/env bash
# model2vec 0.10.0: the vectors of a model that is loaded or saved with int8 embeddings are longer by the scale, which is stored nowhere.
#
# Expected: vectors as before but for rounding, as with quantize_to="float16".
# Seen: the table is divided by its greatest magnitude and multiplied by 127, and what encode gives is the mean of those whole
#   numbers. Directions are right, and vectors are 32 times as long: a linear classifier that was trained on the vectors gives
#   logits as much larger, be the table quantised while loading or saved and loaded again.
# So: multiply by the greatest magnitude of the float table over 127, or keep to float16 where normalize is off.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet model2vec==0.10.0 numpy==2.4.6
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import numpy as np
from model2vec import StaticModel
from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(200)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
table = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)
StaticModel(table, words, normalize=False).save_pretrained("float32")
right = StaticModel.from_pretrained("float32").encode("w1 w2").astype(np.float64)
seen = {}
for name in ("float16", "int8"):
    StaticModel.from_pretrained("float32", quantize_to=name).save_pretrained(name)
    given = StaticModel.from_pretrained(name).encode("w1 w2").astype(np.float64)
    length = np.linalg.norm(given) / np.linalg.norm(right)
    seen[name] = {"longer": round(float(length), 2), "cosine": round(float(given @ right / (right @ right) / length), 4)}
print("beside the float32 vector:", seen, "and 127 / greatest magnitude is", round(float(127 / abs(table).max()), 2))
assert all(found["cosine"] > 0.999 for found in seen.values()), seen
assert abs(seen["float16"]["longer"] - 1) < 0.01 and abs(seen["int8"]["longer"] / (127 / abs(table).max()) - 1) < 0.01, seen
PY
