#!/usr/bin/env bash
# lightning 2.6.6: with StochasticWeightAveraging, no checkpoint that ModelCheckpoint writes has the average as its state_dict.
#
# Expected: that last.ckpt, written at the end, is the averaged model that fit leaves behind; with WeightAveraging and
#   EMAWeightAveraging, which stand beside it in the same module, it is.
# Seen: the average is copied into the model after the last checkpoint was written. In every file state_dict holds the
#   last step's weights; the average lies under callbacks, as average_model_state of StochasticWeightAveraging.
# So: trainer.save_checkpoint after fit, or take average_model_state out of the file.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 lightning==2.6.6
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


same = {}
for name, average in (("swa", StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)), ("wa", WeightAveraging())):
    torch.manual_seed(0)
    model, data = Model(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8)
    trainer = Trainer(max_epochs=5, callbacks=[average, ModelCheckpoint(name, save_last=True)], accelerator="cpu",
                      logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, data)
    stored = torch.load(f"{name}/last.ckpt", weights_only=False)
    left = model.layer.weight
    same[name] = torch.equal(stored["state_dict"]["layer.weight"], left)
    if name == "swa":
        kept = stored["callbacks"]["StochasticWeightAveraging"]["average_model_state"]["layer.weight"]
        same["swa's callback"] = torch.equal(kept, left)
print("last.ckpt holds what fit leaves in the model:", same)
assert same == {"swa": False, "swa's callback": True, "wa": True}, same
PY
