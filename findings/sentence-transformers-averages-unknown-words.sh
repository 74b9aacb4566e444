#!/usr/bin/env bash
# sentence-transformers 6.2.0: a model2vec model counts unknown words in its averages; model2vec 0.10.0 leaves them out.
#
# Expected: one folder of weights, which model2vec writes for both libraries (it holds a modules.json), gives one embedding.
# Seen: of texts with words that the vocabulary lacks, each unknown token adds its vector and its count to the mean: a text
#   of one known word and four unknown ones is nearly the vector of [UNK]. Texts of known words alone agree.
# So: compare embeddings of both libraries on text with rare words, or encode with model2vec.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 sentence-transformers==6.2.0 model2vec==0.10.0
venv/bin/python - <<'PY'
import numpy as np
from model2vec import StaticModel
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{number}": number for number in range(1, 32)}}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
vectors = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
StaticModel(vectors, words).save_pretrained("model")
texts = {"known": "w1 w2", "one of five": "w1 and four others here", "none": "nothing known"}
right = StaticModel.from_pretrained("model").encode(list(texts.values()))
loaded = SentenceTransformer("model", device="cpu").encode(list(texts.values()))
taken = SentenceTransformer(modules=[StaticEmbedding.from_model2vec("model")], device="cpu").encode(list(texts.values()))
def cosine(one, two):
    return round(float(one @ two / max(np.linalg.norm(one) * np.linalg.norm(two), 1e-9)), 2)
seen = {name: cosine(one, two) for name, one, two in zip(texts, right, loaded)}
unknown = cosine(loaded[1], vectors[0])
print("cosine of both libraries' embeddings:", seen, "of 'one of five' with [UNK]:", unknown)
assert np.array_equal(loaded, taken)
assert seen["known"] == 1 and seen["one of five"] < 0.6 and seen["none"] == 0 and unknown > 0.9, (seen, unknown)
PY
