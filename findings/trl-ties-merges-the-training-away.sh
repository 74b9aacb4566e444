#!/usr/bin/env bash
# trl 1.16.0 with mergekit 0.1.5: MergeConfig("ties") and ("dare_ties") of a trained model and the model it came from give the latter.
#
# Expected: something between the two, as "linear" and "slerp" of the same class give it.
# Seen: the trained policy is the base of the merge as well as one of its models. Its own update is zero and has no vote, the other
#   model's update leads from the policy back to where training started, and is added whole: all of the training is gone.
# So: write the mergekit config by hand, with the model that training started from as base_model.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 trl==1.16.0 mergekit==0.1.5
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import copy
from pathlib import Path

import torch
from mergekit.merge import MergeOptions, run_merge
from tiny_llama import LlamaForCausalLM, base
from trl.experimental.merge_model_callback import MergeConfig

policy = copy.deepcopy(base)
for parameter in policy.parameters():
    parameter.data += 0.01 * torch.randn_like(parameter)
base.save_pretrained("start")
policy.save_pretrained("policy")


def apart(one, other):
    return float(sum((a - b).square().sum() for a, b in zip(one.parameters(), other.parameters()))) ** 0.5


seen = {}
for method in ("linear", "slerp", "ties", "dare_ties"):
    chosen = MergeConfig(method)
    chosen.policy_model_path, chosen.target_model_path = (str(Path(name).absolute()) for name in ("policy", "start"))
    run_merge(chosen.create(), method, MergeOptions(copy_tokenizer=False))
    merged = LlamaForCausalLM.from_pretrained(method, dtype=torch.float32)
    seen[method] = round(apart(merged, base) / apart(policy, base), 3)
print("the part of the training that is left:", seen)
assert all(0.3 < seen[name] < 0.7 for name in ("linear", "slerp")), seen
assert all(seen[name] < 0.02 for name in ("ties", "dare_ties")), seen
PY
