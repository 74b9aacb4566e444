#!/usr/bin/env bash
# transformers 5.23.0: a GGUF Llama whose metadata lack head_count_kv loads with the rows of q and k in llama.cpp's order.
#
# Expected: head_count_kv is optional in GGUF, and without it there are as many heads for keys as
#   for queries; so the two files below are one model.
# Seen: without the key q and k keep the order of rows that llama.cpp wants, and nothing is said;
#   the model gives other numbers. All names and shapes are right, and so are v, o and the rest.
# So: write head_count_kv, or compare q_proj with the original's before a GGUF file is used as a base.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
venv/bin/python - <<'PY'
import gguf
from tiny_llama import AutoModelForCausalLM, base, config, logits, off, torch
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
heads = config.num_attention_heads
for name, parameter in base.named_parameters():
    parameter.data *= 10 if "q_proj" in name or "k_proj" in name else 1  # so that attention matters
def permuted(weight):  # each head's two halves interleaved, as convert_hf_to_gguf does
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
seen = {}
for kv in (True, False):
    writer = gguf.GGUFWriter(f"{kv}.gguf", "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    if kv:
        writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for name, tensor in base.state_dict().items():
        array = tensor.float().numpy()
        array = permuted(array) if "q_proj" in name or "k_proj" in name else array
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=f"{kv}.gguf")
    state = model.state_dict()
    other = sorted({name.split(".")[-2] for name, tensor in base.state_dict().items() if not torch.equal(state[name], tensor)})
    seen[kv] = other, float((logits(model) - logits(base)).norm() / logits(base).norm())
print("what differs from the original, and how far logits are off, with head_count_kv and without:", seen)
assert seen[True][0] == [] and seen[True][1] < 1e-5, seen
assert seen[False][0] == ["k_proj", "q_proj"] and seen[False][1] > 0.01, seen
PY
