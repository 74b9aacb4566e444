#!/usr/bin/env bash
# pytrec-eval-terrier 0.5.11: where scores are equal the document whose name sorts last ranks first: renaming changes nDCG.
#
# Expected: the order in which the run gives them, or chance: a model that gives all documents one score is worth nothing.
# Seen: ties are ordered by name, from last to first, as text ("d9" before "d10"). One score for all has an nDCG@10 of 0.47 or of
#   0, by what the right documents are called. Binary vectors of 32 dimensions have ties by the dozen: their nDCG is half as much
#   again with other names. Scores are compared in float32, so that two cosines in float64 next to 1 tie too.
# So: name documents at random, or add a little noise to scores before evaluating quantised vectors, and the same for all models.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 pytrec-eval-terrier==0.5.11
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import numpy as np
import pytrec_eval

drawn = np.random.default_rng(0)


def ndcg(run, right):
    judged = pytrec_eval.RelevanceEvaluator(right, {"ndcg_cut.10"}).evaluate(run)
    return round(float(np.mean([own["ndcg_cut_10"] for own in judged.values()])), 2)


names = [f"d{number}" for number in range(1, 100)]
one_score = {f"q{number}": dict.fromkeys(names, 0.5) for number in range(9)}
flat = {
    "d91 to d99": ndcg(one_score, {query: {f"d{91 + number}": 1} for number, query in enumerate(one_score)}),
    "d11 to d19": ndcg(one_score, {query: {f"d{11 + number}": 1} for number, query in enumerate(one_score)}),
}
# binary vectors of 32 dimensions: a query's right document has 12 of 32 bits flipped
documents = drawn.integers(0, 2, (400, 32))
queries = np.where(drawn.random((400, 32)) < 0.375, 1 - documents, documents)[:100]
scores = (queries[:, None] == documents[None]).sum(-1)
named = {}
for order, name in (("right ones last", lambda n: f"{399 - n:03}"), ("right ones first", lambda n: f"{n:03}")):
    run = {f"q{q}": {name(d): float(scores[q, d]) for d in range(400)} for q in range(100)}
    named[order] = ndcg(run, {f"q{q}": {name(q): 1} for q in range(100)})
close = pytrec_eval.RelevanceEvaluator({"q": {"a": 1}}, {"recip_rank"}).evaluate({"q": {"a": 0.99999999, "b": 0.99999998}})
print("one score for all:", flat, "binary vectors:", named, "reciprocal rank of 0.99999999 beside 0.99999998:", close["q"]["recip_rank"])
assert flat == {"d91 to d99": 0.47, "d11 to d19": 0.0}, flat
assert named["right ones last"] > 1.2 * named["right ones first"], named
assert close["q"]["recip_rank"] == 0.5, close
PY
[ ! -s said ] || { cat said; exit 1; }
