#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: a LoRA on dt_proj of Jamba or Mamba, or on WavLM's attention, is not in the outputs and gets no gradient; merging adds it.
#
# Expected: a layer of nn.Linear that PEFT adapts computes with its adapter, as all others do.
# Seen: the models read the weights of these layers and do the product themselves, past the adapter. It has no effect and no
#   gradient. "all-linear" takes these layers too. merge_and_unload adds the update to the weight, and the merged model has other outputs than the
#   one with the adapter. An adapter that was trained elsewhere, or was merged from others, so counts only when it is merged.
# So: leave these layers out of target_modules, or merge before the model is scored.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import torch
from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM, WavLMConfig, WavLMForCTC

from peft import LoraConfig, get_peft_model

sizes = {"vocab_size": 40, "hidden_size": 16, "initializer_range": 0.5}
jamba = JambaConfig(
    **sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, attn_layer_period=2,
    attn_layer_offset=1, num_experts=1, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4,
)
mamba = MambaConfig(**sizes, num_hidden_layers=2, state_size=4, time_step_rank=4)
wavlm = WavLMConfig(
    **sizes, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 2),
    conv_kernel=(10, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
)
words, sounds = torch.arange(2, 14).reshape(2, 6), torch.randn(2, 400)


def adapted(build, config, target):
    torch.manual_seed(0)
    model = get_peft_model(build(config), LoraConfig(r=4, target_modules=target, init_lora_weights=False))
    for name, own in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(own, std=0.5)
    return model.eval()


models = [
    (JambaForCausalLM, jamba, words, ["dt_proj"], "in_proj"),
    (MambaForCausalLM, mamba, words, ["dt_proj"], "in_proj"),
    (WavLMForCTC, wavlm, sounds, ["q_proj", "k_proj", "v_proj", "attention.out_proj"], "intermediate_dense"),
]
for build, config, given, targets, beside in models:
    model = adapted(build, config, targets)
    with torch.no_grad():
        there = model(given).logits
        with model.disable_adapter():
            plain = model(given).logits
        merged = model.merge_and_unload()(given).logits
    moved, after = (float((one - plain).abs().max()) for one in (there, merged))
    model = adapted(build, config, [*targets, beside])
    model(given).logits.sum().backward()
    without = {name.split(".")[-4] for name, own in model.named_parameters() if "lora_A" in name and own.grad is None}
    print(f"{build.__name__}: the adapter moves logits by {moved:.1e}, merged by {after:.1e}; without a gradient: {sorted(without)}")
    assert moved == 0 and after > 1e-3 and without == {own.split(".")[-1] for own in targets}, (moved, after, without)
everything = get_peft_model(JambaForCausalLM(jamba), LoraConfig(r=4, target_modules="all-linear"))
assert any("dt_proj.lora_A" in name for name, _ in everything.named_parameters())
PY
! grep -qiE "dt_proj|q_proj" said || { cat said; exit 1; }
