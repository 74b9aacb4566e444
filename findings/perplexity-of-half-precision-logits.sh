#!/usr/bin/env bash
# torchmetrics 1.9.0 and torcheval 0.0.7: Perplexity is infinite as soon as one token's probability is too small for the logits' dtype.
#
# Expected: log-softmax, as cross_entropy has it: the mean of the losses, whatever the size of one of them.
# Seen: both take the softmax in the dtype of the logits and its logarithm afterwards. In float16 one token with a loss of 18 makes
#   the perplexity of a whole text infinite, in float32 one of 105; in bfloat16 probabilities near 1 are rounded to 1, and a
#   perplexity of 1.0015 is given as 1 exactly. cross_entropy of the same logits gives the right number. Nothing is said.
# So: score models by cross_entropy of logits in float32; an infinite perplexity is no sign of a broken merge.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0 torcheval==0.0.7
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import torch
from torcheval.metrics import Perplexity as TorchEval
from torchmetrics.text import Perplexity as TorchMetrics


def logits(loss, wrong):
    """Of 200 tokens, each with the loss that is given; the last with the other."""
    made = torch.zeros(1, 200, 10)
    made[0, :, 1:] = -100.0
    made[0, :, 1] = torch.tensor(loss).expm1().log()
    made[0, -1] = 0.0
    made[0, -1, 0] = -wrong
    return made


seen = {}
for name, made, dtype in (
    ("float16, a loss of 18", logits(1.0, 18 - 2.2), torch.float16),
    ("float32, a loss of 112", logits(1.0, 110.0), torch.float32),
    ("float32, a loss of 82", logits(1.0, 80.0), torch.float32),
    ("bfloat16, losses of 0.0015", logits(0.0015, -20.0), torch.bfloat16),
):
    made, target = made.to(dtype), torch.zeros(1, 200, dtype=torch.long)
    right = torch.nn.functional.cross_entropy(made.double().flatten(0, 1), target.flatten()).exp().item()
    given = []
    for kind in (TorchMetrics, TorchEval):
        metric = kind()
        metric.update(made, target)
        given.append(round(float(metric.compute()), 5))
    seen[name] = round(right, 5), *given
print("right, torchmetrics, torcheval:", seen)
for name in ("float16, a loss of 18", "float32, a loss of 112"):
    assert seen[name][0] < 6 and seen[name][1:] == (float("inf"),) * 2, seen
assert all(abs(given - seen["float32, a loss of 82"][0]) < 1e-3 for given in seen["float32, a loss of 82"]), seen
assert seen["bfloat16, losses of 0.0015"][0] > 1.001 and seen["bfloat16, losses of 0.0015"][1:] == (1.0, 1.0), seen
PY
! grep -qiE "float16|precision|overflow|inf" log || { cat log; exit 1; }
