#!/usr/bin/env bash
# sentence-transformers 6.2.0: encode(precision="int8") of documents and of queries gives numbers that do not belong together.
#
# Expected: one scale for a model, so that two calls can be compared, as with float embeddings.
# Seen: each call takes least and greatest of every dimension from the texts that it is given, and stores neither; with a
#   hundred texts or more nothing is said. The same text of two calls has a cosine of 0.7 with itself, and of the ten nearest
#   documents two are those of the float embeddings; where queries were encoded in the documents' call nine are.
# So: encode in float, and quantize_embeddings(..., ranges=...) with the same ranges for both.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 sentence-transformers==6.2.0
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(200)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
drawn = np.random.default_rng(0)
vectors = drawn.standard_normal((200, 64)).astype(np.float32)
model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_weights=vectors), Normalize()], device="cpu")


def texts(count, start):
    return [" ".join([*start, *(f"w{word}" for word in drawn.integers(1, 200, 4 - len(start)))]) for _ in range(count)]


queries = texts(200, ["w1", "w2"])
documents = texts(2000, []) + queries


def unit(array):
    array = array.astype(np.float64)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def nearest(asked, stored):
    return np.argsort(-(unit(asked) @ unit(stored).T), axis=1)[:, :10]


right = nearest(model.encode(queries), model.encode(documents))
stored, asked = model.encode(documents, precision="int8"), model.encode(queries, precision="int8")


def shared(found):
    return round(float(np.mean([len(set(one) & set(other)) / 10 for one, other in zip(found, right)])), 2)


seen = {"two calls": shared(nearest(asked, stored)), "one call": shared(nearest(stored[2000:], stored))}
cosine = round(float((unit(asked) * unit(stored[2000:])).sum(1).mean()), 2)
print("of the ten nearest are as with floats:", seen, "and the cosine of a text with itself over two calls:", cosine)
assert seen["two calls"] < 0.4 and seen["one call"] > 0.8 and cosine < 0.85, (seen, cosine)
PY
! grep -qi "quantiz" log || { cat log; exit 1; }
