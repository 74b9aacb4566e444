#!/usr/bin/env bash
# rouge-score 0.1.2: ROUGE of a text in Cyrillic, Greek or Chinese with itself is 0, and of German words with other ones 1.
#
# Expected: 1 for equal texts, and less for others.
# Seen: the default tokenizer keeps a to z and 0 to 9 alone. Of other scripts nothing is left, and a summary scores 0 whatever it says,
#   unless it has a number: then the numbers decide. Words break at letters with marks, so that "Größe" is "gr" and "e", as "Grüße" is.
#   A table of a model for several languages looks as if it had learned some and not others.
# So: pass RougeScorer a tokenizer of its own, with tokenize(text).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 rouge-score==0.1.2
venv/bin/python - <<'PY'
import re

from rouge_score.rouge_scorer import RougeScorer


class Words:
    def tokenize(self, text):
        return re.findall(r"\w+", text.lower())


pairs = {
    "English": ("the weather is fine", "the weather is fine"),
    "Russian": ("погода сегодня хорошая", "погода сегодня хорошая"),
    "Greek": ("ο καιρός είναι καλός", "ο καιρός είναι καλός"),
    "Chinese": ("今天天气很好", "今天天气很好"),
    "Russian with a number": ("в 2024 году цены выросли", "премию 2024 получил поэт"),
    "other German words": ("Größe Küche", "Grüße Köche"),
}
usual, own = RougeScorer(["rouge1"]), RougeScorer(["rouge1"], tokenizer=Words())
seen = {
    name: tuple(round(float(scorer.score(*pair)["rouge1"].fmeasure), 2) for scorer in (usual, own)) for name, pair in pairs.items()
}
print("ROUGE-1, by the default tokenizer and by words:", seen)
assert seen["English"] == (1, 1), seen
assert all(seen[name] == (0, 1) for name in ("Russian", "Greek", "Chinese")), seen
assert seen["Russian with a number"][0] == 1 > 0.5 > seen["Russian with a number"][1], seen
assert seen["other German words"] == (1, 0), seen
PY
