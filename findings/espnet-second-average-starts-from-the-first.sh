#!/usr/bin/env bash
# espnet 202511: of several averages of best checkpoints only the first is right: the next ones start from an average in place of the best model.
#
# Expected: keep_nbest_models=[2, 3] gives the mean of the best two and the mean of the best three.
# Seen: the sum is made in the dictionary of the best checkpoint, which is kept for the next average: the second counts
#   the mean of two as the best model, and what follows from it. With two criteria the averages of the second are made of those
#   of the first. Checkpoints of 2, 4, 8, 16 and 32 give 5 and not 4.67 as the mean of the best three, and two means of all five:
#   13.0 by loss and 11.4 by accuracy, where both are 12.4. Nothing is said.
# So: ask for one average and one criterion a run, or average again from the files of the epochs.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 humanfriendly==10.0 typeguard==4.5.0 packaging==25.0
venv/bin/pip install --quiet --no-deps espnet==202511
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
from pathlib import Path

import torch
from espnet2.main_funcs.average_nbest_models import average_nbest_models
from espnet2.train.reporter import Reporter

reporter = Reporter()
for epoch in range(1, 6):
    torch.save({"weight": torch.tensor([2.0**epoch])}, f"{epoch}epoch.pth")
    reporter.set_epoch(epoch)
    with reporter.observe("valid") as observed:
        observed.register({"loss": 0.1 * epoch, "acc": 0.5 + 0.01 * epoch})
        observed.next()
average_nbest_models(Path("."), reporter, [("valid", "loss", "min"), ("valid", "acc", "max")], [2, 3, 5])
seen = {
    (criterion, best): round(torch.load(f"valid.{criterion}.ave_{best}best.pth")["weight"].item(), 2)
    for criterion in ("loss", "acc")
    for best in (2, 3, 5)
}
print("averages of the best of 2, 4, 8, 16 and 32 by loss, and of 32, 16, ... by accuracy:", seen)
assert seen["loss", 2] == 3, seen
assert seen["loss", 3] == 5 and seen["loss", 5] == 13 and seen["acc", 5] == 11.4, seen
PY
! grep -qiE "average" log || { cat log; exit 1; }
