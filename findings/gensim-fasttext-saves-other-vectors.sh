#!/usr/bin/env bash
# gensim 4.4.0: what is written into wv.vectors of a FastText model is gone after saving: an average of two is the first.
#
# Expected: wv.vectors are the words' vectors, as in Word2Vec: the model gives what is written there, and stores it.
# Seen: it gives it, and neither save nor save_facebook_model stores it: both store the parts that words are made of
#   (vectors_vocab and vectors_ngrams), and loading makes wv.vectors anew. Nor did unknown words change. In a Word2Vec model
#   the average is stored.
# So: average wv.vectors_vocab and wv.vectors_ngrams, which are linear, and call wv.adjust_vectors().
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 gensim==4.4.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import numpy as np
from gensim.models import FastText, Word2Vec
from gensim.models.fasttext import load_facebook_model, save_facebook_model

texts = [[f"word{n % 50}", f"term{7 * n % 40}", f"word{3 * n % 50}"] for n in range(2000)]
seen = {}


def share(model, first, average):
    """How much of the way from the first model to the average a model has gone."""
    return round(float(np.vdot(model.wv["word1"] - first, average - first) / np.vdot(average - first, average - first)), 3)


for kind in (Word2Vec, FastText):
    one, two = (kind(texts, vector_size=16, min_count=1, epochs=2, seed=seed, workers=1) for seed in (1, 2))
    assert one.wv.index_to_key == two.wv.index_to_key
    first, unknown = one.wv["word1"].copy(), one.wv["word99"].copy() if kind is FastText else None
    average = (one.wv["word1"] + two.wv["word1"]) / 2
    one.wv.vectors[:] = (one.wv.vectors + two.wv.vectors) / 2
    one.save("own")
    seen[kind.__name__] = {"in memory": share(one, first, average), "saved": share(kind.load("own"), first, average)}
    if kind is FastText:
        save_facebook_model(one, "own.bin")
        seen["FastText"]["saved for facebook"] = share(load_facebook_model("own.bin"), first, average)
        assert np.array_equal(one.wv["word99"], unknown)
        for name in ("vectors_vocab", "vectors_ngrams"):
            getattr(one.wv, name)[:] = (getattr(one.wv, name) + getattr(two.wv, name)) / 2
        one.wv.adjust_vectors()
        one.save("own")
        seen["FastText"]["parts averaged, saved"] = share(FastText.load("own"), first, average)
print("from the first model (0) to the average (1):", seen)
assert seen["Word2Vec"] == {"in memory": 1, "saved": 1}, seen
assert seen["FastText"] == {"in memory": 1, "saved": 0, "saved for facebook": 0, "parts averaged, saved": 1}, seen
PY
[ ! -s said ] || { cat said; exit 1; }
