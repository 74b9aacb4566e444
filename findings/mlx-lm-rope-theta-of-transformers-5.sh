#!/usr/bin/env bash
# mlx-lm 0.32.2: a Llama, Mistral or Qwen2 that transformers 5.23.0 saved loads with a rope_theta of 10000 and no scaling, a Qwen3 with its own.
#
# Expected: the model that was saved, as this version of mlx-lm needs transformers 5 itself.
# Seen: transformers 5 writes rope_theta and rope_scaling into "rope_parameters". A few models here read that, Qwen3
#   among them; the others take what they call rope_theta and rope_scaling, find neither, and go by their defaults
#   without a warning. The longer the text, the more the answers are off.
# So: write both names into config.json beside rope_parameters before mlx_lm.convert, load or fuse.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
venv/bin/python - <<'PY'
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64)
scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
configs = {
    "Llama of 10000": transformers.LlamaConfig(**sizes),
    "Llama of 500": transformers.LlamaConfig(**sizes, rope_theta=500.0),
    "Llama scaled": transformers.LlamaConfig(**sizes, rope_scaling=scaling),
    "Mistral of 500": transformers.MistralConfig(**sizes, rope_theta=500.0, sliding_window=None),
    "Qwen2 of 500": transformers.Qwen2Config(**sizes, rope_theta=500.0),
    "Qwen3 of 500": transformers.Qwen3Config(**sizes, rope_theta=500.0, head_dim=8),
}
saved, mended = {}, {}
for name, config in configs.items():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 3  # so that positions count for something
        right = model(torch.arange(4, 24)[None]).logits.numpy()
    folder = Path(name)
    model.save_pretrained(folder)
    for off in (saved, mended):
        found = np.array(load_model(folder)[0](mx.arange(4, 24)[None]))
        off[name] = round(float(np.linalg.norm(found - right) / np.linalg.norm(right)), 4)
        written = json.loads((folder / "config.json").read_text())
        rope = written["rope_parameters"]
        written["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            written["rope_scaling"] = {key: own for key, own in rope.items() if key != "rope_theta"}
        (folder / "config.json").write_text(json.dumps(written))
print("logits off as saved:", saved, "with the old names too:", mended)
wrong = {name for name, off in saved.items() if off > 0.01}
assert wrong == {"Llama of 500", "Llama scaled", "Mistral of 500", "Qwen2 of 500"}, saved
assert max(mended.values()) < 0.001, mended
PY
