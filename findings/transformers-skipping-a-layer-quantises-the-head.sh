#!/usr/bin/env bash
# transformers 5.23.0 with bitsandbytes 0.50.2: to name one layer in llm_int8_skip_modules has the head quantised to 4 bits.
#
# Expected: the layer stays float as well as the head, which load_in_4bit leaves float by default.
# Seen: the list replaces the default and is not added to it. With ["o_proj"] lm_head is Linear4bit, and the logits of a model of
#   which more was left float are further from the base's than with no list at all. The name in the setting says int8;
#   it counts for 4 bits too.
# So: write "lm_head" into the list, and look at type(model.lm_head).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 bitsandbytes==0.50.2
HF_HUB_OFFLINE=1 venv/bin/python - <<'PY'
from tiny_llama import LlamaConfig, LlamaForCausalLM, logits
from transformers import BitsAndBytesConfig

config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    tie_word_embeddings=False,
)
base = LlamaForCausalLM(config)
base.save_pretrained("base")
right = logits(base)
seen, apart = {}, {}
for name, skipped in (("no list", None), ("o_proj", ["o_proj"]), ("o_proj and lm_head", ["o_proj", "lm_head"])):
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skipped)
    model = LlamaForCausalLM.from_pretrained("base", quantization_config=packed, device_map="cpu")
    seen[name] = type(model.lm_head).__name__, type(model.model.layers[0].self_attn.o_proj).__name__
    apart[name] = round(float((logits(model).float() - right).norm() / right.norm()), 3)
print("head and o_proj:", seen, "distance of the logits:", apart)
assert seen == {
    "no list": ("Linear", "Linear4bit"),
    "o_proj": ("Linear4bit", "Linear"),
    "o_proj and lm_head": ("Linear", "Linear"),
}, seen
assert apart["o_proj and lm_head"] < apart["no list"] < apart["o_proj"], apart
PY
