#!/usr/bin/env bash
# litgpt 0.5.13: convert_hf_checkpoint takes a model's configuration from a table by the name of its folder, and reads no config.json.
#
# Expected: a fine-tune with another RoPE base, as one with a longer context has, computes in LitGPT as in transformers.
# Seen: model_config.yaml is written from the table of known models. What changes no shape is that of the table: here a base of
#   10000 where config.json says 500000, and the same holds of epsilons, windows and scalings. All weights are converted, the two
#   models' logits are far apart, and merges and LoRA trainings of it are of that other model. Nothing is said.
# So: compare logits of the converted model, or correct model_config.yaml by hand before training.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==4.57.6 litgpt==0.5.13
venv/bin/python - > log 2>&1 <<'PY' || { cat log; exit 1; }
from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

known = Config.from_name("pythia-14m")
seen = {}
for base in (10_000, 500_000):
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=known.padded_vocab_size, hidden_size=known.n_embd, num_hidden_layers=known.n_layer,
            num_attention_heads=known.n_head, intermediate_size=known.intermediate_size, max_position_embeddings=known.block_size,
            rotary_pct=known.rotary_percentage, rotary_emb_base=base, use_parallel_residual=True, initializer_range=0.2,
        )
    ).eval()
    folder = Path(f"base{base}/pythia-14m")
    model.save_pretrained(folder)
    convert_hf_checkpoint(folder.absolute())
    config = Config.from_file(folder / "model_config.yaml")
    converted = GPT(config).eval()
    converted.load_state_dict(torch.load(folder / "lit_model.pth"), strict=True)
    words = torch.randint(0, 50_000, (1, 128))
    with torch.no_grad():
        right, given = model(words).logits, converted(words)
    seen[base] = {"base in LitGPT": config.rope_base, "logits off by": round(float((given - right).norm() / right.norm()), 3)}
print("by the RoPE base in config.json:", seen)
assert seen[10_000]["logits off by"] < 0.01, seen
assert seen[500_000]["base in LitGPT"] == 10_000 and seen[500_000]["logits off by"] > 0.05, seen
PY
grep "by the RoPE base" log
! grep -qiE "warn.*(rope|config)" log || { cat log; exit 1; }
