#!/usr/bin/env bash
# sentence-transformers 6.2.0: RerankingEvaluator gives a model that has one vector for all texts an MRR of 1.
#
# Expected: what chance gives, 0.46 for one right document of five. The evaluator's MAP counts ties as such and is 0.2.
# Seen: right documents are put before wrong ones and sorted by score, and where scores are equal the order stays: a model that has
#   collapsed is the best that there is by mrr@10. InformationRetrievalEvaluator goes by the order of the corpus: where
#   the right document of each query stands first there, the same model has an nDCG of 1, and of 0 where it stands last.
# So: look at map and ndcg, or compare with a model that is known to be bad.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 sentence-transformers==6.2.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator, RerankingEvaluator
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(200)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
drawn = np.random.default_rng(0)


def model(vectors):
    return SentenceTransformer(modules=[StaticEmbedding(words, embedding_weights=vectors.astype(np.float32))], device="cpu")


collapsed = model(np.ones((200, 16)))
right = drawn.permutation(np.arange(1, 200))
samples = [
    {"query": f"w{right[5 * n]}", "positive": [f"w{right[5 * n + 1]}"], "negative": [f"w{w}" for w in drawn.integers(1, 200, 4)]}
    for n in range(39)
]
found = {key: round(float(own), 2) for key, own in RerankingEvaluator(samples, name="")(collapsed).items()}
documents = {f"d{number}": f"w{number}" for number in range(1, 100)}
queries = {f"q{number}": f"w{number}" for number in range(100, 140)}
ranked = {}
for first in ("d1", "d99"):
    judged = InformationRetrievalEvaluator(queries, documents, {query: {first} for query in queries})(collapsed)
    ranked[first] = float(judged["cosine_ndcg@10"])
print("a collapsed model, reranking:", found, "retrieval, where the first or the last document is right:", ranked)
assert found["mrr@10"] == 1 and found["map"] == 0.2, found
assert ranked == {"d1": 1.0, "d99": 0.0}, ranked
PY
! grep -qiE " tie|equal scores" said || { cat said; exit 1; }
