#!/usr/bin/env bash
# peft 0.21.2: a LoRA of dense layers and experts from transformers 4 loses one of the two in 5: DeepSeek-V3 its dense layers, Qwen2-MoE its experts.
#
# Expected: all of the trained adapter, or an error; of a Qwen3-MoE, all layers of which have experts alone, it is all.
# Seen: the three names are those of dense layers, shared experts and experts. Transformers 5 holds experts as single
#   tensors. For DeepSeek-V3 PEFT takes the names from target_modules to target_parameters, and dense layers and shared
#   experts are the base's; for Qwen2-MoE it leaves them, and the experts are the base's. Unused keys are not named.
# So: merge with the transformers that trained the adapter, or compare the file's keys with the model's names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in old new; do python3 -m venv $name; done
old/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==4.57.1 peft==0.18.0
new/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2
cat > layers.py <<'PY'
import sys

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

transformers.utils.logging.set_verbosity_error()
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2, max_position_embeddings=64)
configs = {
    "Qwen3-MoE": transformers.Qwen3MoeConfig(**sizes, num_experts=4, head_dim=8),
    "Qwen2-MoE": transformers.Qwen2MoeConfig(**sizes, num_experts=4, shared_expert_intermediate_size=24),
    "DeepSeek-V3": transformers.DeepseekV3Config(
        **sizes, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
}
def fresh(name):
    return transformers.AutoModelForCausalLM.from_pretrained(f"base {name}", dtype=torch.float32)
def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(4, 24)[None]).logits
torch.manual_seed(0)
seen, layers = {}, {}
for name, config in configs.items():
    if sys.argv[1] == "train":
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(f"base {name}")
        targets = ["gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(fresh(name), LoraConfig(target_modules=targets, r=4, task_type="CAUSAL_LM"))
        for own, parameter in model.named_parameters():
            if "lora_" in own:
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(name)
        torch.save(logits(model), f"{name}.pt")
    else:
        right, start = torch.load(f"{name}.pt"), logits(fresh(name))
        model = PeftModel.from_pretrained(fresh(name), name)
        seen[name] = round(float((logits(model) - right).norm() / (right - start).norm()), 3)
        layers[name] = {"experts" if ".experts." in own else "others" for own, _ in model.named_parameters() if "lora_" in own}
if seen:
    print("off from the trained model, as parts of what the adapter does:", seen, "layers with a LoRA:", layers)
    assert seen["Qwen3-MoE"] == 0 and min(seen["Qwen2-MoE"], seen["DeepSeek-V3"]) > 0.3, seen
    assert layers["Qwen2-MoE"] == {"others"} and layers["DeepSeek-V3"] == {"experts"}, layers
PY
old/bin/python layers.py train
new/bin/python layers.py load
