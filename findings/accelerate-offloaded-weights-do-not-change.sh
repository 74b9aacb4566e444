#!/usr/bin/env bash
# accelerate 1.15.0: arithmetic in place on the weights of a model under cpu_offload does nothing, and raises nothing.
#
# Expected: other weights, or an error, since the parameters are meta tensors.
# Seen: the parameters hold no numbers, and operations in place on such tensors pass. The layers take their numbers
#   from a map beside the model, at each call. Adding an update to all weights leaves the logits as they were, to the bit.
#   So does halving the weights, and so does filling them with zeros.
# So: call remove_hook_from_submodules(model) first. It gives the weights back, and what changes them then counts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import copy
import warnings

from tiny_llama import base, logits, torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules

before = logits(base)
model = cpu_offload(copy.deepcopy(base), execution_device=torch.device("cpu"))
seen = {}
with warnings.catch_warnings(record=True) as told, torch.no_grad():
    warnings.simplefilter("always")
    for name, change in {
        "added": lambda weight: weight.add_(torch.ones(weight.shape)),
        "halved": lambda weight: weight.mul_(0.5),
        "zeroed": lambda weight: weight.zero_(),
    }.items():
        for parameter in model.parameters():
            change(parameter)
        seen[name] = float((logits(model) - before).abs().max())
    remove_hook_from_submodules(model)
    for parameter in model.parameters():
        parameter.zero_()
    seen["zeroed without hooks"] = float((logits(model) - before).abs().max())
told = [str(one.message) for one in told if issubclass(one.category, UserWarning)]
print("how far the logits moved:", seen, "warnings:", told)
assert seen["added"] == seen["halved"] == seen["zeroed"] == 0 and not told, seen
assert seen["zeroed without hooks"] > 1e-3, seen
PY
