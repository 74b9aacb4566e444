#!/usr/bin/env bash
# lightning 2.6.6: EMAWeightAveraging that is told to start later validates and stores the untrained model until then, and may end with it.
#
# Expected: update_starting_at_step=100 means that until step 100 the average is the model, or that there is none.
# Seen: until then the average is the copy that was made before the first step. Validation runs with it, checkpoints hold it as their
#   state_dict, a monitored loss does not move, and the end of the training copies it over the model: 99 steps are lost.
#   Nothing is said.
# So: start at a step that the training reaches well before its first validation, and compare what comes out with the start.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 lightning==2.6.6
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.losses = []

    def training_step(self, batch, _):
        return (self.layer(batch) - 1).square().mean()

    def validation_step(self, batch, _):
        self.losses.append(round(self.training_step(batch, _).item(), 3))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


seen = {}
for name, callbacks in (("none", []), ("at 100", [EMAWeightAveraging(decay=0.9, update_starting_at_step=100)])):
    torch.manual_seed(0)
    model = Model()
    start, data = model.layer.weight.detach().clone(), torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=16)
    trainer = Trainer(
        max_epochs=99, check_val_every_n_epoch=33, callbacks=[*callbacks, ModelCheckpoint(name, save_last=True)], accelerator="cpu",
        logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(model, data, data)
    stored = torch.load(f"{name}/last.ckpt", weights_only=False)["state_dict"]["layer.weight"]
    seen[name] = {
        "losses": model.losses,
        "stored": torch.equal(stored, start),
        "model": torch.equal(model.layer.weight.detach(), start),
    }
print("losses in validation, and whether checkpoint and model are the start after 99 steps:", seen)
assert seen["none"]["losses"][-1] < 0.01 and not seen["none"]["stored"] and not seen["none"]["model"], seen
assert len(set(seen["at 100"]["losses"])) == 1 and seen["at 100"]["stored"] and seen["at 100"]["model"], seen
PY
! grep -qiwE "averag.*|ema" log || { cat log; exit 1; }
