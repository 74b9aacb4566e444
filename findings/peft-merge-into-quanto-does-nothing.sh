#!/usr/bin/env bash
# peft 0.21.2 with optimum-quanto 0.2.7: merge_and_unload of a LoRA on a frozen quanto model gives the model without the LoRA.
#
# Expected: the merged weights, quantised again, or an error: peft refuses other formats that it cannot merge.
# Seen: peft adds the update in place to what quanto gives it, which is a dequantised copy: the weights stay. merge_adapter
#   marks its layers as merged all the same, and the adapter is switched off. safe_merge=True does not help. A model that
#   was quantised and not frozen is merged well.
# So: merge before freeze(), or into the float model, and compare the outputs with those before merging.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2 optimum-quanto==0.2.7
venv/bin/python - <<'PY'
import copy
import warnings

from tiny_llama import base, logits, torch
from optimum.quanto import freeze, qint4, qint8, quantize
from peft import LoraConfig, get_peft_model

config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=4, lora_alpha=16)
def merged(kind, frozen, **settings):
    """How far the merged model is from the adapter's, and from the quantised base, beside what the adapter does."""
    model = copy.deepcopy(base)
    quantize(model, weights=kind)
    if frozen:
        freeze(model)
    start = logits(model)
    torch.manual_seed(0)
    adapted = get_peft_model(model, config)
    right = logits(adapted)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = logits(adapted.merge_and_unload(**settings))
    assert not [own for own in said if "merg" in str(own.message).lower()], said
    size = (right - start).norm()
    return [round(float((found - other).norm() / size), 2) for other in (right, start)]
seen = {
    "int8": merged(qint8, frozen=True),
    "int4": merged(qint4, frozen=True),
    "int8, safe_merge": merged(qint8, frozen=True, safe_merge=True),
    "int8, not frozen": merged(qint8, frozen=False),
}
print("distance from the adapter's model, and from the one without it:", seen)
frozen = [seen[name] for name in ("int8", "int4", "int8, safe_merge")]
assert frozen == [[1.0, 0.0]] * 3, seen
assert seen["int8, not frozen"][0] < 0.1 and seen["int8, not frozen"][1] > 0.9, seen
PY
