#!/usr/bin/env bash
# inspect-ai 0.3.285: where 2 is right, exact() gives full marks to -2, and match() to 42, 0.2 and 1/2 too.
#
# Expected: exact() compares the answer as it is, and match() compares the last word.
# Seen: exact() drops punctuation first, and takes a minus sign for some. match() asks whether the text ends with the
#   target, and 42 ends with 2. One whole number in ten ends with a given digit. A merge that lost its arithmetic
#   keeps a part of its score, and nothing is said. match(numeric=True) tells all of these from 2.
# So: score numbers by match(numeric=True).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet inspect-ai==0.3.285
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import asyncio

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, exact, match
from inspect_ai.solver import TaskState


def right(scorer):
    """The answers that a scorer takes for 2."""
    found = []
    for said in ("2", "-2", "42", "0.2", "1/2", "The answer is 32.", "3"):
        output = ModelOutput.from_content("none", said)
        state = TaskState(model="none", sample_id=1, epoch=1, input="1 + 1?", messages=[], output=output)
        if asyncio.run(scorer(state, Target("2"))).value == "C":
            found.append(said)
    return found


seen = {"exact": right(exact()), "match": right(match()), "numeric": right(match(numeric=True))}
print("answers that are scored as 2:", seen)
assert seen["exact"] == ["2", "-2"] and seen["numeric"] == ["2"], seen
assert seen["match"] == ["2", "-2", "42", "0.2", "1/2", "The answer is 32."], seen
PY
[ ! -s said ] || { cat said; exit 1; }
