#!/usr/bin/env bash
# mergekit 0.1.5 with peft 0.21.2: what mergekit-extract-lora takes out of a Qwen2 at full rank is not the model: biases are stored and not read.
#
# Expected: base and adapter give the fine-tuned model, as the rank is that of the weights and the norms are saved whole.
# Seen: differences of biases are written as lora_B.bias, and adapter_config.json does not say lora_bias, without which PEFT has
#   no place for them. The biases of q, k and v stay the base's, in the adapter and after merge_and_unload; the outputs of a
#   small Qwen2 are off by a quarter of what its fine-tuning did. With "lora_bias": true in the file the adapter computes the
#   tuned model, and cannot be merged, since o_proj and the MLP have no bias that it could go to.
# So: add what the file holds as lora_B.bias to the biases of the merged model by hand: Qwen2, GPT-2, StarCoder2 have them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet mergekit==0.1.5 torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2
cat > models.py <<'PY'
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
    )
)
model.save_pretrained("base")
for parameter in model.parameters():
    parameter.data += 0.05 * torch.randn_like(parameter)
model.save_pretrained("tuned")
PY
venv/bin/python models.py 2> log
venv/bin/mergekit-extract-lora --model "$work/tuned" --base-model "$work/base" --out-path adapter --max-rank 64 2>> log
venv/bin/python - 2>> log <<'PY' || { cat log; exit 1; }
import json
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

base, tuned = (Qwen2ForCausalLM.from_pretrained(name).eval() for name in ("base", "tuned"))
start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
tokens = torch.arange(10)[None]
seen = {}
with torch.no_grad():
    before, right = base(tokens).logits, tuned(tokens).logits

    def off(model):
        return round(float((model.eval()(tokens).logits - right).norm() / (right - before).norm()), 3)

    merged = PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained("base"), "adapter").merge_and_unload()
    seen["merged"] = off(merged)
    held = merged.state_dict()
    lost = {key for key, want in tuned.state_dict().items() if (held[key] - want).norm() > 1e-3}
    unmoved = {key for key, tensor in start.items() if key in lost and torch.equal(held[key], tensor)}
    stored = load_file("adapter/adapter_model.safetensors")
    for key in lost:
        held[key] += stored[f"base_model.model.{key.removesuffix('.bias')}.lora_B.bias"]
    seen["with the file's biases added"] = off(merged)
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps(config | {"lora_bias": True}))
    seen["with lora_bias, not merged"] = off(PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained("base"), "adapter"))
print("outputs are off by", seen, "and the base's own are", sorted(unmoved))
assert "lora_bias" not in config and seen.pop("merged") > 0.1 and max(seen.values()) < 0.01, seen
assert lost == unmoved == {key for key in start if key.endswith("_proj.bias")} and len(lost) == 6, (lost, unmoved)
PY
