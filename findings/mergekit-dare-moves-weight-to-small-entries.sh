#!/usr/bin/env bash
# mergekit 0.1.5: dare_linear of an update with an outlier gives, over many draws, a sixth of the outlier and twice of the rest.
#
# Expected: what is kept is divided by the density, so that the mean over draws is the update; with della each
#   entry is divided by the probability that it was kept with.
# Seen: what is kept is multiplied by one factor for the tensor: the sum of its magnitudes before, divided by the sum after. With
#   one entry of 1000 among 999 ones the factor is 1.8 where it was kept and 20 where it was not. della keeps on average 0.44 of
#   the smallest quarter of a normal update, and 1.16 of the largest.
# So: where an unbiased mean is wanted drop and divide beforehand, and merge with task_arithmetic.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PY'
import torch
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import TensorGroup

torch.manual_seed(0)


def mean(name, update, draws=3000, **own):
    """The mean over draws of what a method makes of one update, with its own defaults for what is not given."""
    method, group = registry.get(name), TensorGroup.from_tensors([torch.zeros_like(update), update], base_index=0)
    settings = {setting.name: setting.default for setting in method.spec.parameters}
    settings |= {name: {group.non_base[0].id: value} for name, value in ({"weight": 1.0} | own).items()}
    return sum(method.merge_group(group, **settings) for _ in range(draws)) / draws


spiked = torch.ones(1000)
spiked[0] = 1000
found = mean("dare_linear", spiked, density=0.1) / spiked
dare = {"outlier": round(float(found[0]), 2), "the rest": round(float(found[1:].mean()), 2)}
normal = torch.randn(1000)
order = normal.abs().argsort()
found = (mean("della_linear", normal, density=0.5, epsilon=0.3) / normal)[order]
della = [round(float(quarter.mean()), 2) for quarter in found.chunk(4)]
print("mean over draws beside the update: dare_linear", dare, "and della_linear by quarters of magnitude", della)
assert dare["outlier"] < 0.3 and dare["the rest"] > 1.5, dare
assert della[0] < 0.6 and della[3] > 1.1, della
PY
