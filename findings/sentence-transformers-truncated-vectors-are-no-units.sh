#!/usr/bin/env bash
# sentence-transformers 6.2.0: with truncate_dim a model that ends in Normalize gives vectors of lengths from 0.5 to 0.9.
#
# Expected: unit vectors, as the model's last module makes them and as with all dimensions.
# Seen: vectors are cut after the last module. What stores them and takes the dot product, which is right for the whole vectors,
#   has another nearest document for four texts of ten: those whose first dimensions hold much come out first.
# So: encode(normalize_embeddings=True), which normalises after the cut, for every Matryoshka model.
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
vectors = (drawn.standard_normal((200, 64)) * np.linspace(2, 0.2, 64)).astype(np.float32)
parts = [StaticEmbedding(words, embedding_weights=vectors), Normalize()]
texts = [" ".join(f"w{word}" for word in drawn.integers(1, 200, 4)) for _ in range(300)]
lengths, nearest = {}, {}
for name, cut, settings in (("whole", None, {}), ("cut", 16, {}), ("cut and made units", 16, {"normalize_embeddings": True})):
    given = SentenceTransformer(modules=parts, truncate_dim=cut, device="cpu").encode(texts, **settings)
    length = np.linalg.norm(given, axis=1)
    lengths[name] = [round(float(length.min()), 2), round(float(length.max()), 2)]
    likeness = given @ given.T
    np.fill_diagonal(likeness, -np.inf)
    nearest[name] = likeness.argmax(1)
same = float((nearest["cut"] == nearest["cut and made units"]).mean())
print("lengths of vectors:", lengths, "and the part whose nearest by the dot product is that of units:", round(same, 2))
assert lengths["whole"] == lengths["cut and made units"] == [1, 1] and lengths["cut"][0] < 0.6, lengths
assert same < 0.8, same
PY
