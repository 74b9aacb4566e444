#!/usr/bin/env bash
# transformers 5.23.0: a StarCoder2 from a GGUF file has a rope_theta of 10000, whatever rope.freq_base says, and no window.
#
# Expected: rope.freq_base becomes rope_theta, as for Llama, Qwen and Gemma.
# Seen: the key is not among those that are read for this architecture, nor is attention.sliding_window. Published StarCoder2
#   models have a theta of 100000 to 1000000: all weights are equal, the logits are not, and nothing is said.
# So: set config.rope_parameters and config.sliding_window oneself: AutoConfig of the original, given as config=.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
venv/bin/python - <<'PY'
import gguf
import torch
from transformers import AutoModelForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

torch.manual_seed(0)
seen = {}
for theta in (10000.0, 1000000.0):
    config = Starcoder2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=16,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    model = Starcoder2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data *= 10 if "q_proj" in name or "k_proj" in name else 1  # so that attention matters
    writer = gguf.GGUFWriter("model.gguf", "starcoder2")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_eps(config.norm_epsilon)
    writer.add_rope_freq_base(theta)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{number}" for number in range(64)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STARCODER2, 2)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf").eval()
    held = found.state_dict()
    equal = all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        right, short = model(torch.arange(12)[None]).logits, found(torch.arange(12)[None]).logits  # shorter than the window
    off = round(float((short - right).norm() / right.norm()), 4)
    seen[theta] = equal, found.config.rope_parameters["rope_theta"], found.config.sliding_window, off
print("by the file's theta: weights equal, theta and window of the loaded model, logits off by:", seen)
assert seen[10000.0][:3] == seen[1000000.0][:3] == (True, 10000.0, None), seen
assert seen[10000.0][3] < 0.0001 and seen[1000000.0][3] > 0.01, seen
PY
