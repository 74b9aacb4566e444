#!/usr/bin/env bash
# math-verify 0.9.0: of a number in plain text, parse takes a part: 1e-05 is 1, 2.5e3 is 2.5, 1 1/2 is 1, and - 5 is 5.
#
# Expected: the number, or none: what cannot be read gives an empty list.
# Seen: the exponent, the fraction of a mixed number, and a minus with a space are left behind. Python writes 0.00001 as 1e-05: with
#   such a gold answer the answer 1 is right and 0.00001 is wrong. A reward made of verify pays for it either way.
# So: write gold answers without exponents and between dollar signs, and look at what parse gives for each of them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet 'math-verify[antlr4_13_2]==0.9.0'
venv/bin/python - <<'PY' 2>said || { cat said; exit 1; }
from math_verify import parse, verify

seen = {text: float(parse(text)[0]) for text in (str(1e-05), "The answer is 2.5e3", "The answer is 1 1/2", "The answer is - 5")}
print("read as:", seen)
assert list(seen.values()) == [1, 2.5, 1, 5], seen
gold = parse(str(1e-05))
scores = {answer: verify(gold, parse(answer)) for answer in ("1", "0.00001", "$10^{-5}$")}
minus = {answer: verify(parse("$-5$"), parse(answer)) for answer in ("The answer is - 5", "The answer is -5", "The answer is $- 5$")}
print("scores where 1e-05 is right:", scores, "where -5 is:", minus)
assert scores == {"1": True, "0.00001": False, "$10^{-5}$": False}, scores
assert list(minus.values()) == [False, True, True], minus
PY
! grep -i -E "warn|could not" said
