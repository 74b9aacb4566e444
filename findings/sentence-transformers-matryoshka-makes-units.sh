#!/usr/bin/env bash
# sentence-transformers 6.2.0: MatryoshkaLoss gives the loss that it wraps unit vectors, at the model's full width too.
#
# Expected: with matryoshka_dims=[width], the loss that was wrapped; with more, its sum over cut vectors.
# Seen: after the cut each vector is divided by its length. Losses of cosines do not notice. MSELoss of a student that gives its
#   teacher's very vectors is 6.8, not 0, and its gradient moves the student away from the teacher. TripletLoss has a margin of 5,
#   and unit vectors are at most 2 apart: no triplet ever reaches it, the worst and the best are both trained on for ever.
#   What the model gives after training is not divided.
# So: wrap losses of cosines alone, or set the margin, and divide the teacher's vectors and cut them oneself.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 sentence-transformers==6.2.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(200)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
vectors = (3 * np.random.default_rng(0).standard_normal((200, 64))).astype(np.float32)
vectors[6], vectors[7] = vectors[5], -vectors[5]  # the best triplet that there is: the same, and the opposite
model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_weights=vectors)], device="cpu")


def loss(own, texts, labels):
    features = [model.preprocess([text]) for text in texts]
    with torch.no_grad():
        return round(float(own(features, labels)), 2)


teacher = torch.tensor(model.encode(["w5"]))
seen = {}
for name, own, texts, labels in (
    ("a ranking of cosines", losses.MultipleNegativesRankingLoss(model), ["w5", "w8", "w9"], None),
    ("its teacher's vectors", losses.MSELoss(model), ["w5"], teacher),
    ("the best triplet", losses.TripletLoss(model), ["w5", "w6", "w7"], None),
):
    seen[name] = [loss(own, texts, labels), loss(losses.MatryoshkaLoss(model, own, [64]), texts, labels)]
print("losses, plain and in MatryoshkaLoss of the full width:", seen)
plain, wrapped = seen["a ranking of cosines"]
assert abs(plain - wrapped) < 0.02, seen
assert seen["its teacher's vectors"][0] == 0 and seen["its teacher's vectors"][1] > 5, seen
assert seen["the best triplet"] == [0, 3], seen
PY
! grep -qiE "normaliz|margin" said || { cat said; exit 1; }
