#!/usr/bin/env bash
# peft 0.21.2: the second of two active C3A adapters is given what the first one gave, and not the layer's input.
#
# Expected: both updates are added to the layer, as merge_and_unload adds them, and as two LoRA add up.
# Seen: after adapter A, adapter B adds B A x to a square layer, and not B x. The order of the two decides. Merging them
#   gives another model than the one that ran: W + A + B. Where a layer's two widths differ the call raises.
#   Two LoRA give one model, in both orders and merged.
# So: judge a sum of C3A adapters by the merged model, and never by two active ones.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import warnings

import torch
from peft import C3AConfig, LoraConfig, get_peft_model

given = torch.eye(8)


def measure(config, trained):
    """What two active adapters add to a square layer, against the sum, the chain and the merged layer."""
    torch.manual_seed(0)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)), config)
    model.add_adapter("second", config)
    for name, parameter in model.named_parameters():
        if trained in name:
            parameter.data = torch.randn_like(parameter)
    layer = model.base_model.model[0]
    weight = layer.get_base_layer().weight.detach().clone()
    a, b = (layer.get_delta_weight(name).detach() for name in ("default", "second"))

    def off(right):
        with torch.no_grad():
            return round(float((model(given).T - weight - right).norm() / (a + b).norm()), 2)

    seen = {}
    model.base_model.set_adapter(["default", "second"])
    seen["sum"], seen["chain"] = off(a + b), off(a + b @ a)
    model.base_model.set_adapter(["second", "default"])
    seen["other order, sum"], seen["other order, chain"] = off(a + b), off(b + a @ b)
    merged = model.merge_and_unload()[0].weight.detach()
    seen["merged, sum"] = round(float((merged - weight - a - b).norm() / (a + b).norm()), 2)
    return seen


with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    seen = {
        "c3a": measure(C3AConfig(block_size=4, target_modules=["0"]), "c3a_kernel"),
        "lora": measure(LoraConfig(r=2, target_modules=["0"]), "lora_"),
    }
told = [str(one.message) for one in told if issubclass(one.category, UserWarning)]
print("how far two active adapters are from:", seen, "warnings:", told)
c3a, lora = seen["c3a"], seen["lora"]
assert c3a["chain"] == c3a["other order, chain"] == c3a["merged, sum"] == 0 and not told, seen
assert c3a["sum"] > 0.5 and c3a["other order, sum"] > 0.5, seen
assert lora["sum"] == lora["other order, sum"] == lora["merged, sum"] == 0, seen
PY
