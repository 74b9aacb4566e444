#!/usr/bin/env bash
# orbax 0.12.8: a CheckpointManager stores no step that is not above the last one in its folder, and says so by returning False.
#
# Expected: a run that starts again from an older step, or a fine-tuning that counts from 0 in the same folder, is stored, or refused.
# Seen: save() returns False for each step up to the last one of the folder. The latest checkpoint stays that of the first run:
#   restore() gives its weights, and those of the second run are nowhere. save(force=True) would store them.
# So: look at what save() returns, delete the steps above the one that a run starts from, or give every run a folder of its own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8
venv/bin/python -W error::UserWarning - <<'PY' 2>said || { cat said; exit 1; }
import pathlib

import jax.numpy as jnp
import orbax.checkpoint as ocp

folder = pathlib.Path("run").absolute()
def run(steps, value):
    """Stores a checkpoint at each step; gives what save() said, the steps in the folder and the latest weight."""
    with ocp.CheckpointManager(folder) as manager:
        said = [manager.save(step, args=ocp.args.StandardSave({"weight": jnp.full(4, value)})) for step in steps]
        manager.wait_until_finished()
        return said, sorted(manager.all_steps()), float(manager.restore(manager.latest_step())["weight"][0])
first = run([100, 200, 300], 1.0)
second = run([0, 50, 150, 250, 300], 2.0)
print("first run:", first, "second run, from step 0:", second)
assert first == ([True] * 3, [100, 200, 300], 1.0), first
assert second == ([False] * 5, [100, 200, 300], 1.0), second
PY
! grep -i -E "not sav|skip" said
