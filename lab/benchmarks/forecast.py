"""A merge of eight 405B Llamas, on paper: `covmerge plan --cluster` over headers alone.

    python -m benchmarks.forecast [--methods ace ties] [--cluster nodes=16,gpus=8,...]

The checkpoints have headers and no data: sparse files, which a plan reads no more of.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

WORK = Path(__file__).parent / "work" / "forecast"
HIDDEN, INNER, LAYERS, VOCABULARY, KEYS = 16384, 53248, 126, 128256, 1024
SHAPES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"},
    **{f"self_attn.{name}_proj": (KEYS, HIDDEN) for name in "kv"},
    **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["ace", "ties"])
    parser.add_argument("--cluster", default="nodes=16,gpus=8,nic=25GB/s,disk=7GB/s,cores=96")
    arguments = parser.parse_args()
    names = [f"e{number}" for number in range(8)]
    for name in ("base", *names):
        save(WORK / name)
    for method in arguments.methods:
        recipe = {"base": str(WORK / "base"), "method": method}
        file = WORK / f"{method}.yml"
        file.write_text(json.dumps({**recipe, "experts": {n: str(WORK / n) for n in names}}))
        command = [sys.executable, "-m", "covmerge", "plan", str(file)]
        subprocess.run([*command, "--cluster", arguments.cluster], check=True)
    shutil.rmtree(WORK)


def save(folder: Path) -> None:
    """Write a checkpoint of headers, a layer a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ends = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    layers = [
        {f"model.layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
        for layer in range(LAYERS)
    ]
    where: dict[str, str] = {}
    for number, tensors in enumerate([ends, *layers], 1):
        file = f"model-{number:05}-of-{LAYERS + 1:05}.safetensors"
        header, end = {}, 0
        for name, (d_out, d_in) in tensors.items():
            size = 2 * d_out * d_in
            place = [end, end + size]
            header[f"{name}.weight"] = {
                "dtype": "BF16",
                "shape": [d_out, d_in],
                "data_offsets": place,
            }
            where[f"{name}.weight"] = file
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main()
