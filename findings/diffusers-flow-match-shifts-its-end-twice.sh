#!/usr/bin/env bash
# diffusers 0.42.1: FlowMatchEulerDiscreteScheduler(shift=3) ends at three times the noise of one that is told set_shift(3) later.
#
# Expected: one schedule: both have a shift of 3.
# Seen: the constructor shifts its noise levels and keeps the shifted ends; set_timesteps lays steps between these ends and shifts
#   them again. The last level of any number of steps is 0.0089 and not 0.0030, and with 1000 steps hardly a level is
#   one that the constructor made, on which a model is trained. With set_shift the ends are those without a shift.
# So: compare scheduler.sigmas before and after set_timesteps(num_train_timesteps), and give sigmas= where they must agree.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 diffusers==0.42.1
venv/bin/python - <<'PY'
from diffusers import FlowMatchEulerDiscreteScheduler

def schedule(steps, early=1.0, late=None):
    own = FlowMatchEulerDiscreteScheduler(shift=early)
    trained = own.sigmas.clone()
    if late is not None:
        own.set_shift(late)
    own.set_timesteps(steps)
    return trained, own.sigmas[:-1]
ends = {
    f"{steps} steps": [round(float(schedule(steps, **given)[1][-1]), 4) for given in ({"early": 3.0}, {"late": 3.0})]
    for steps in (4, 28, 1000)
}
print("last noise level, shift=3 and set_shift(3):", ends)
assert set(map(tuple, ends.values())) == {(0.0089, 0.003)}, ends
agree = {}
for shift in (1.0, 3.0):
    trained, found = schedule(1000, early=shift)
    agree[shift] = int(((trained - found).abs() < 1e-6).sum())
print("levels of 1000 that are those of the constructor, by shift:", agree)
assert agree[1.0] == 1000 and agree[3.0] < 5, agree
PY
