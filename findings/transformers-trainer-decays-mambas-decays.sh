#!/usr/bin/env bash
# transformers 5.23.0: Trainer's weight decay shrinks A_log and D of a Mamba and the scale of its last norm.
#
# Expected: decay of matrices alone: Trainer leaves out biases and norms, and Mamba's authors mark A_log and D as without decay.
# Seen: Trainer goes by the names of parameters, and these are called otherwise than in a Llama: A_log, D and norm_f (an RMSNorm).
#   Where the loss does not move them, 100 steps with a decay of 0.1 and a rate of 0.1 shrink each to a third: the states'
#   decays exp(A_log), 1 to 16 before, are 1 to 2.8, which no training asked for.
# So: hand Trainer an optimizer whose group without decay has these names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 venv/bin/python - 2>said <<'PY' || { cat said; exit 1; }
import torch
from transformers import MambaConfig, MambaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=16))
settings = TrainingArguments("out", weight_decay=0.1, learning_rate=0.1, report_to=[], use_cpu=True)
trainer = Trainer(model, settings)
trainer.create_optimizer()
names = {id(own): name.removeprefix("backbone.layers.0.mixer.") for name, own in model.named_parameters()}
groups = {group["weight_decay"]: {names[id(own)] for own in group["params"]} for group in trainer.optimizer.param_groups}
print("with decay:", sorted(groups[0.1]), "without:", sorted(groups[0.0]))
assert {"A_log", "D", "backbone.norm_f.weight"} <= groups[0.1], groups
assert {"backbone.layers.0.norm.weight", "dt_proj.bias"} <= groups[0.0], groups

mixer = model.backbone.layers[0].mixer
before = mixer.A_log.detach().exp().max().item()
for _ in range(100):
    for own in model.parameters():
        own.grad = torch.zeros_like(own)
    trainer.optimizer.step()
after, scale = mixer.A_log.detach().exp().max().item(), model.backbone.norm_f.weight.detach().mean().item()
print("largest decay of a state:", round(before, 2), "->", round(after, 2), "scale of the last norm: 1 ->", round(scale, 2))
assert round(before) == 16 and 2.7 < after < 2.9 and 0.35 < scale < 0.38, (before, after, scale)
PY
