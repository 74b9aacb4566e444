#!/usr/bin/env bash
# transformers 5.23.0 with schedulefree 1.4.1: a checkpoint of a Trainer is the schedule-free average only where an evaluation came right before.
#
# Expected: the checkpoint holds the averaged weights, which are what the method trains, and what an evaluation scores.
# Seen: the optimizer keeps the point of its gradients in the model and puts the average there when it is told that an evaluation
#   begins. Trainer tells it before evaluating, and not before saving. A run without an evaluation stores the other point, in its
#   checkpoints and in save_model; one that evaluates at each save stores the average. The two runs are equal till then.
# So: evaluate at each step that is stored, or call the optimizer's eval() before save_model.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 schedulefree==1.4.1
HF_HUB_OFFLINE=1 venv/bin/python - <<'PY'
import copy

from safetensors.torch import load_file
from tiny_llama import base, torch
from transformers import Trainer, TrainingArguments

rows = [{"input_ids": own, "labels": own} for own in torch.randint(0, 64, (32, 8))]
def trained(evaluations):
    """What a run stored at its end and in save_model, and the two points that its optimizer knows."""
    torch.manual_seed(0)
    settings = TrainingArguments(
        evaluations,
        optim="schedule_free_adamw",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        num_train_epochs=4,
        save_strategy="epoch",
        eval_strategy=evaluations,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(copy.deepcopy(base), settings, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.save_model(f"{evaluations}/end")
    stored = [load_file(f"{evaluations}/{name}/model.safetensors") for name in ("checkpoint-16", "end")]
    optimizer = trainer.optimizer.optimizer
    points = []
    for turn in (optimizer.eval, optimizer.train):
        turn()
        points.append({name: own.clone() for name, own in trainer.model.state_dict().items()})
    return stored, points
def same(one, other):
    return all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
seen = {}
for evaluations in ("no", "epoch"):
    stored, points = trained(evaluations)
    seen[evaluations] = [["average", "gradients"][[same(own, point) for point in points].index(True)] for own in stored]
    assert not same(*points)
print("what was stored, in the last checkpoint and by save_model, without and with evaluations:", seen)
assert seen == {"no": ["gradients"] * 2, "epoch": ["average"] * 2}, seen
PY
