#!/usr/bin/env bash
# optuna 5.0.0: a study that is resumed with TPESampler(seed=0) tries the same five merge weights again.
#
# Expected: the sampler goes on from the trials that are stored: they are what it learns from.
# Seen: the study keeps its trials, and not the state of the random numbers. A new sampler of the same seed draws
#   the same numbers until it has ten trials to learn from. Two workers of one seed do the same. Ten merges are made
#   and scored, and five different ones are known. Nothing is said of the repetition.
# So: give each start its own seed or none, or store the sampler with the study.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet optuna==5.0.0
cat > search.py <<'PY'
import sys

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

optuna.logging.set_verbosity(optuna.logging.WARNING)
sampler = optuna.samplers.TPESampler(seed=int(sys.argv[1]))
storage = JournalStorage(JournalFileBackend("trials.log"))
study = optuna.create_study(study_name="merge", storage=storage, sampler=sampler, load_if_exists=True)
study.optimize(lambda trial: sum((trial.suggest_float(name, 0, 1) - 0.5) ** 2 for name in "ab"), n_trials=5)
tried = [tuple(trial.params[name] for name in "ab") for trial in study.trials]
print(f"{len(tried)} trials, {len(set(tried))} different")
PY
seen=$(for seed in 0 0 1; do venv/bin/python search.py $seed 2>> said || { cat said; exit 1; }; done)
echo "after starts with seeds 0, 0 and 1:" $seen
[ "$(echo $seen)" = "5 trials, 5 different 10 trials, 5 different 15 trials, 10 different" ]
[ ! -s said ] || { cat said; exit 1; }
