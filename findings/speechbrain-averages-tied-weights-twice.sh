#!/usr/bin/env bash
# speechbrain 1.1.2: the average of checkpoints of a model with tied weights counts the second and later ones twice.
#
# Expected: average_checkpoints and average_state_dicts give the mean of each weight; a tied embedding and head are one weight.
# Seen: sums are made in place, in the first state_dict, once for each name: where two names share memory (in a state_dict, and in
#   what torch.load gives of it) all models but the first are added twice. Tied weights of 0, 1 and 3 give 1.67 where 3 is the newest (2.67
#   where 0 is), and not 1.33. Where state_dicts of live models are given, the first model is left as the sum.
# So: untie (clone every value) before averaging, or compare the norm of the average with those of its parts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 hyperpyyaml==1.2.3 joblib scipy sentencepiece soundfile tqdm requests packaging huggingface_hub
venv/bin/pip install --quiet --no-deps speechbrain==1.1.2
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import sys
import types

import torch

# what it imports and averaging does not use: its wheels want a torch with CUDA
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__version__ = "2.11.0"

from speechbrain.utils.checkpoints import Checkpointer, average_checkpoints, average_state_dicts


class Model(torch.nn.Module):
    def __init__(self, value, tied):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 4)
        self.head = torch.nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            parameter.data.fill_(value)


seen = {}
for tied in (False, True):
    saved = Checkpointer(f"tied{tied}", allow_partial_load=False)
    for value in (0.0, 1.0, 3.0):
        saved.recoverables = {"model": Model(value, tied)}
        saved.save_checkpoint(name=f"{value:.0f}")
    average = average_checkpoints(saved.find_checkpoints(max_num_checkpoints=3), "model")
    seen["tied" if tied else "not tied"] = {name: round(weight[0, 0].item(), 2) for name, weight in average.items()}
live = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
for value, model in zip((1.0, 3.0), live):
    model.weight.data.fill_(value)
average_state_dicts(model.state_dict() for model in live)
seen["first of 1 and 3 afterwards"] = live[0].weight.item()
print("average of 0, 1 and 3:", seen)
assert set(seen["not tied"].values()) == {1.33}, seen
assert min(seen["tied"].values()) > 1.6, seen
assert seen["first of 1 and 3 afterwards"] == 4, seen
PY
! grep -qiE "tied|shared|in.?place" log || { cat log; exit 1; }
