#!/usr/bin/env bash
# transformers 5.23.0: a GGUF tokenizer whose tokenizer.ggml.pre is not among the known names, as SmolLM2's, cuts texts as GPT-2 does.
#
# Expected: the same token ids as those of the tokenizer that the file was made of, or an error about the name.
# Seen: "qwen2" and "llama-bpe" are read. "smollm" and "starcoder" are passed over without a word: texts are cut as GPT-2's are, with
#   numbers in one piece, where these models read each digit. Where the vocabulary has tokens of several digits, the ids are others.
# So: load the tokenizer of the original model beside the file's weights.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 gguf==0.19.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import gguf
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
merges = [("1", "2"), ("12", "3"), ("Ġ", "a")]
tokens = [*letters, "12", "123", "Ġa", "<s>", "</s>"]
bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
of_qwen = [
    pre_tokenizers.Split(Regex(QWEN), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
]
one_digit = [pre_tokenizers.Digits(individual_digits=True), bytes_]  # as in tokenizer.json of SmolLM2 and StarCoder
kinds = {"qwen2": of_qwen, "smollm": one_digit, "starcoder": one_digit, "gpt-2": [bytes_]}


def ids(kind):
    own = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(tokens)}, merges=merges))
    own.pre_tokenizer, own.decoder = pre_tokenizers.Sequence(kinds[kind]), decoders.ByteLevel()
    return own.encode("a 123 + a 4123").ids


def written(kind):
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_block_count(1), writer.add_context_length(64), writer.add_embedding_length(8)
    writer.add_feed_forward_length(8), writer.add_head_count(2), writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5), writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre(kind), writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(len(tokens) - 2), writer.add_eos_token_id(len(tokens) - 1)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    loaded = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
    return loaded("a 123 + a 4123", add_special_tokens=False)["input_ids"]


seen = {kind: (len(ids(kind)), len(found), found == ids(kind), found == ids("gpt-2")) for kind in kinds for found in [written(kind)]}
print("tokens of the original, tokens of the file, the same, as GPT-2's:", seen)
assert seen["qwen2"][2] and not seen["qwen2"][3] and seen["gpt-2"][2], seen
for kind in ("smollm", "starcoder"):
    assert not seen[kind][2] and seen[kind][3], seen
PY
