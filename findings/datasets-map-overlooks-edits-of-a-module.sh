#!/usr/bin/env bash
# datasets 5.2.0: map of an imported function gives the results of its old code after its module was edited.
#
# Expected: the cache is keyed by what the function does, as it is for a function of the script itself.
# Seen: a function of a module is hashed by its name alone. After an edit the next run reads the cached columns of
#   the code before. The same edit in the script is noticed. A new prompt or a mended metric in a module
#   then changes no score that is cached.
# So: pass load_from_cache_file=False, or new_fingerprint with the version of the code.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 datasets==5.2.0
printf '{"logit": 1}\n{"logit": 2}\n' > rows.jsonl
cat > metric.py <<'PY'
def score(row):
    return {"score": row["logit"] + 1}
PY
cat > evaluate.py <<'PY'
from datasets import disable_progress_bars, load_dataset
from metric import score

disable_progress_bars()


def own(row):
    return {"score": row["logit"] + 1}


rows = load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
print(*(rows.map(one, **fields)["score"][:] for one, fields in ((score, {}), (own, {}), (score, {"load_from_cache_file": False}))))
PY
run() { HF_HOME="$work" PYTHONDONTWRITEBYTECODE=1 venv/bin/python evaluate.py 2>> said || { cat said; exit 1; }; }
before=$(run)
sed -i 's/+ 1/+ 100/' metric.py evaluate.py
after=$(run)
echo "scores by the module's function, by the script's, and without the cache: before the edit $before, after it $after"
[ "$before" = "[2, 3] [2, 3] [2, 3]" ] && [ "$after" = "[2, 3] [101, 102] [101, 102]" ]
! grep -qiE "cache|stale|fingerprint" said || { cat said; exit 1; }
