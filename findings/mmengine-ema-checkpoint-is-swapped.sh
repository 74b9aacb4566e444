#!/usr/bin/env bash
# mmengine 0.10.7: in a checkpoint of a training with EMAHook, ema_state_dict holds the trained weights and state_dict the average.
#
# Expected: state_dict is the model that was trained, as in a checkpoint without the hook, and ema_state_dict its average.
# Seen: the two are exchanged as the file is written. Whoever takes the average of the file by its name gets the raw weights, and a
#   merge of state_dict from two trainings, one with the hook and one without, is of an average and a last step. The hook's
#   averages begin at the first step, with a momentum of 0.0002: after a short training state_dict is nearly the start.
# So: read state_dict where the average is wanted, and ema_state_dict without its "module." where it is not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 mmengine==0.10.7
venv/bin/python - > log 2>&1 <<'PY' || { cat log; exit 1; }
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import DataLoader


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        self.layer.weight.data.zero_()

    def forward(self, numbers, mode="loss"):
        return {"loss": ((self.layer(numbers) - 1) ** 2).mean()}


seen = {}
for hooks in ([], [{"type": "EMAHook"}]):
    runner = Runner(
        Model(),
        "out",
        train_dataloader=DataLoader([(torch.ones(1),)] * 20),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        custom_hooks=hooks,
        experiment_name=f"hooks{len(hooks)}",
    )
    runner.train()
    file = torch.load("out/epoch_1.pth", weights_only=False)
    seen[len(hooks)] = {
        "trained": round(runner.model.layer.weight.item(), 3),
        "state_dict": round(file["state_dict"]["layer.weight"].item(), 3),
    }
    if hooks:
        seen[1]["ema_state_dict"] = round(file["ema_state_dict"]["module.layer.weight"].item(), 3)
print("without the hook and with it:", seen)
assert seen[0]["trained"] == seen[0]["state_dict"] > 0.9, seen
assert seen[1]["trained"] == seen[1]["ema_state_dict"] > 0.9 and seen[1]["state_dict"] < 0.3, seen
PY
grep "without the hook" log
! grep -qiE "swap|exchang" log || { cat log; exit 1; }
