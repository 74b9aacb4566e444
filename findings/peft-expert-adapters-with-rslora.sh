#!/usr/bin/env bash
# peft 0.21.2: an rsLoRA adapter of a Mixtral's experts that was trained with transformers 4 is a fifth off in 5.
#
# Expected: the trained model, as for the same adapter without use_rslora.
# Seen: transformers 5 holds w1 and w3 of an expert as one tensor, so PEFT makes one LoRA of 2r out of two of r, and
#   doubles alpha to keep alpha / r. The scale of rsLoRA is alpha / sqrt(r): the first two projections get sqrt(2)
#   times their update, w2 does not, and merge_and_unload writes that. All that is said, with rsLoRA and without, is
#   that a rank_pattern matched nothing.
# So: merge such adapters with the transformers that trained them (4.57.1 here), and load the merged model.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in old new; do python3 -m venv $name; done
old/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==4.57.1 peft==0.18.0
new/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2
cat > experts.py <<'PY'
import sys

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

transformers.utils.logging.set_verbosity_error()
def fresh():
    return transformers.MixtralForCausalLM.from_pretrained("base", dtype=torch.float32)
def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(4, 24)[None]).logits
torch.manual_seed(0)
if sys.argv[1] == "train":
    transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64)).save_pretrained("base")
seen = {}
for name, stable in (("LoRA", False), ("rsLoRA", True)):
    if sys.argv[1] == "train":
        config = LoraConfig(target_modules=["w1", "w2", "w3"], r=4, use_rslora=stable, task_type="CAUSAL_LM")
        model = get_peft_model(fresh(), config)
        for own, parameter in model.named_parameters():
            if "lora_" in own:
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(name)
        torch.save(logits(model), f"{name}.pt")
    else:
        right, start = torch.load(f"{name}.pt"), logits(fresh())
        model = PeftModel.from_pretrained(fresh(), name)
        for way, found in (("loaded", model), ("merged", model.merge_and_unload())):
            seen[name, way] = round(float((logits(found) - right).norm() / (right - start).norm()), 3)
if seen:
    print("off from the trained model, as parts of what the adapter does:", seen)
    assert seen["LoRA", "loaded"] == seen["LoRA", "merged"] == 0, seen
    assert min(seen["rsLoRA", "loaded"], seen["rsLoRA", "merged"]) > 0.1, seen
PY
old/bin/python experts.py train
new/bin/python experts.py load
