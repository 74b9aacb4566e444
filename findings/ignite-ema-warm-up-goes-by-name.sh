#!/usr/bin/env bash
# pytorch-ignite 0.5.5: an EMAHandler that is attached under a name other than "ema_momentum" has no warm-up.
#
# Expected: attach(engine, name="generator_momentum"), as its documentation does for two models, warms up as without a name.
# Seen: the warm-up always sets the momentum "ema_momentum", and the average reads the one of its own name, which stays at the last
#   value (0.0002): after 50 steps the average is at the start and not at the model. Of two handlers on one engine both warm-ups
#   turn the one called "ema_momentum". A warning says that ema_momentum was created, not that the warm-up is lost.
# So: print engine.state's momentum during the warm-up, or leave the name away and attach one handler.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 pytorch-ignite==0.5.5
venv/bin/python - <<'PY'
import torch
from ignite.engine import Engine
from ignite.handlers import EMAHandler

seen = {}
for names in (["ema_momentum"], ["generator_momentum"], ["generator_momentum", "ema_momentum"]):
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    engine = Engine(lambda engine, batch: model.weight.data.fill_(1.0))
    handlers = [EMAHandler(model, momentum=0.0002, momentum_warmup=0.5, warmup_iters=100) for _ in names]
    for name, handler in zip(names, handlers):
        handler.attach(engine, name=name)
    engine.run(range(50))
    seen[tuple(names)] = [round(handler.ema_model.weight.item(), 3) for handler in handlers]
print("averages of a model that went from 0 to 1, 50 steps later:", seen)
assert seen["ema_momentum",] == [1.0], seen
assert seen["generator_momentum",][0] < 0.02 and seen["generator_momentum", "ema_momentum"][0] < 0.02, seen
PY
