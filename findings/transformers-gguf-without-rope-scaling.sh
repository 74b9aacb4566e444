#!/usr/bin/env bash
# transformers 5.23.0: a model that is loaded from a GGUF file has no RoPE scaling, whatever the file says.
#
# Expected: rope.scaling.type and rope.scaling.factor are read, as rope.freq_base is, and so is the tensor rope_freqs
#   that Llama 3.1 and later ones have instead.
# Seen: all three are passed over without a word; rope_parameters says "default", and the logits are those of a model
#   without scaling. Short texts hide it.
# So: give from_pretrained the config of the original model (config=...) beside gguf_file.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
venv/bin/python - <<'PY'
import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64)
kinds = {
    "theta of 500": dict(rope_type="default", rope_theta=500.0),
    "linear": dict(rope_type="linear", factor=4.0, rope_theta=10000.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=16, rope_theta=10000.0),
}
def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(4, 24)[None]).logits
def write(model, rope, path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2), writer.add_context_length(64), writer.add_embedding_length(32)
    writer.add_feed_forward_length(48), writer.add_head_count(4), writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps), writer.add_vocab_size(64)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_tokenizer_model("gpt2"), writer.add_token_list([f"w{number}" for number in range(64)])
    writer.add_token_merges(["a b"]), writer.add_bos_token_id(1), writer.add_eos_token_id(2)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":  # the divisor of each frequency, as llama.cpp's converter writes it
        plain = 10000.0 ** -(np.arange(0, 8, 2) / 8)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in model.state_dict().items():
        own = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            own = own.reshape(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(own))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
off, kept = {}, {}
for name, rope in kinds.items():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 3  # so that positions count for something
    write(model, rope, "model.gguf")
    found = LlamaForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32)
    right = logits(model)
    off[name] = round(float((logits(found) - right).norm() / right.norm()), 4)
    kept[name] = found.config.rope_parameters
print("logits off:", off, "rope_parameters:", kept)
assert off["theta of 500"] < 0.001 < 0.01 < min(off["linear"], off["llama3"]), off
assert {own["rope_type"] for own in kept.values()} == {"default"}, kept
PY
