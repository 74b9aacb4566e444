#!/usr/bin/env bash
# gensim 4.4.0: after an average or another edit of wv.vectors the similarities are divided by the old lengths, and reach 2.6.
#
# Expected: most_similar gives cosines, the largest first, of the vectors that are there.
# Seen: lengths are computed at the first question and kept, in the file as well. The average of two spaces has shorter vectors than
#   either: similarities are wrong by both lengths, most words' nearest one is another, and long vectors come first.
#   wv.similarity(a, b) divides by the true lengths: the two functions disagree.
# So: call wv.fill_norms(force=True) after each edit, and once on every file that was edited.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 gensim==4.4.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import numpy as np
from gensim.models import KeyedVectors

drawn = np.random.default_rng(0)
words = [f"w{number}" for number in range(300)]


def space(sizes):
    vectors = KeyedVectors(16)
    vectors.add_vectors(words, (drawn.standard_normal((300, 16)) * sizes[:, None]).astype(np.float32))
    return vectors


# two models in which frequent words are long in one and short in the other
one, two = space(np.linspace(0.5, 3, 300)), space(np.linspace(3, 0.5, 300))
one.most_similar("w0")  # any question before the edit
one.vectors[:] = (one.vectors + two.vectors) / 2
one.save("average")


def nearest(vectors):
    return [vectors.most_similar(word, topn=1)[0] for word in words]


kept, stored = nearest(one), nearest(KeyedVectors.load("average"))
apart = max(abs(found - one.similarity(word, other)) for word, (other, found) in zip(words, kept, strict=True))
one.fill_norms(force=True)
right = nearest(one)
same = float(np.mean([a[0] == b[0] for a, b in zip(kept, right, strict=True)]))
largest = {"kept": max(own[1] for own in kept), "stored": max(own[1] for own in stored), "right": max(own[1] for own in right)}
largest = {name: round(float(own), 2) for name, own in largest.items()}
print("largest similarity:", largest)
print("the part of words with the right nearest one:", round(same, 2), "off similarity() by", round(float(apart), 2))
assert largest["kept"] == largest["stored"] > 1.2 and largest["right"] < 1, largest
assert same < 0.6 and apart > 0.3, (same, apart)
PY
[ ! -s said ] || { cat said; exit 1; }
