"""Peak memory against the size of the model, at one largest tensor; and merges within --max-memory.

    python -m benchmarks.streaming [--methods average ace] [--layers 2 4] [--out FILE.json]

Three bfloat16 experts of Llama-shaped bases of more and more layers, every merge in a process of its
own, the way a user starts it. The floor reads the same four checkpoints tensor by tensor, sums them in
float32, and writes nothing. ACE is left out of models of more than four layers: its work grows with
them, its memory does not. The last rows give `--max-memory`, and the bytes read over it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.measure import machine, spawn

WORK = Path(__file__).parent / "work"
RESULTS = Path(__file__).parent / "results"

# TinyLlama-1.1B.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 22,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

FLOOR = """
import sys
from safetensors import safe_open
files = [safe_open(path, "pt", backend="pread") for path in sys.argv[1:]]
total = 0.0
for name in files[0].keys():
    summed = files[0].get_tensor(name).float()
    for file in files[1:]:
        summed += file.get_tensor(name)
    total += float(summed.sum())
print(total)
"""


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint."""
    d, ff = config["hidden_size"], config["intermediate_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": (d,),
            f"{prefix}mlp.down_proj.weight": (d, ff),
            f"{prefix}mlp.gate_proj.weight": (ff, d),
            f"{prefix}mlp.up_proj.weight": (ff, d),
            f"{prefix}post_attention_layernorm.weight": (d,),
            f"{prefix}self_attn.k_proj.weight": (kv, d),
            f"{prefix}self_attn.o_proj.weight": (d, d),
            f"{prefix}self_attn.q_proj.weight": (d, d),
            f"{prefix}self_attn.v_proj.weight": (kv, d),
        }
    return found | {"model.norm.weight": (d,), "lm_head.weight": (config["vocab_size"], d)}


def make_checkpoints(folder: Path, config: dict, experts: int) -> list[Path]:
    """Write a random base and experts whose updates differ sixfold in norm, in bfloat16."""
    marker = folder / "complete.json"
    paths = [folder / name for name in ("base", *(f"expert{t}" for t in range(1, experts + 1)))]
    if marker.exists() and json.loads(marker.read_text()) == config:
        return paths
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    for number, path in enumerate(paths):
        tensors = {}
        # The base is drawn again for each expert: four float copies would not fit small machines.
        base = torch.Generator().manual_seed(1)
        for name, shape in shapes(config).items():
            weight = torch.randn(shape, generator=base).mul_(0.02)
            if number:
                scale = 4e-4 * 6 ** ((number - 1) / max(1, experts - 1))
                weight.add_(torch.randn(shape, generator=generator), alpha=scale)
            tensors[name] = weight.to(torch.bfloat16)
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config, indent=1))
        print(f"wrote {path}", file=sys.stderr)
    marker.write_text(json.dumps(config))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["average", "ace"])
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--max-memory", type=int, default=800, help="MB, of the largest model")
    parser.add_argument("--out", type=Path, default=RESULTS / "streaming.json")
    arguments = parser.parse_args()
    rows = []
    for layers in arguments.layers:
        paths = made(layers)
        files = [str(path / "model.safetensors") for path in paths]
        size = sum(Path(file).stat().st_size for file in files)
        floor = spawn([sys.executable, "-c", FLOOR, *files], log=WORK / "floor.log")
        shown = {"layers": layers, "bytes_read": size}
        rows.append({**shown, "what": "read and sum", **floor})
        limit = f"{arguments.max_memory}MB"
        merges = [(method, []) for method in arguments.methods if method != "ace" or layers <= 4]
        if layers == max(arguments.layers):
            merges.append(("average", ["--max-memory", limit]))
        for method, options in merges:
            row = {**shown, "what": " ".join([method, *options]), **merged(method, paths, options)}
            row["seconds / read and sum"] = round(row["seconds"] / floor["seconds"], 2)
            if options:
                row["bytes_read / max_memory"] = round(size / (arguments.max_memory * 1e6), 1)
            rows.append(row)
        print(*rows[-len(merges) - 1 :], sep="\n", flush=True)
    result = {"command": "python -m benchmarks.streaming", "machine": machine(), "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def made(layers: int) -> list[Path]:
    """The checkpoints of a model with so many layers."""
    config = {**CONFIG, "num_hidden_layers": layers}
    # In a process of its own: a child inherits its parent's peak memory as its own.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(make_checkpoints, WORK / f"llama-{layers}x3", config, 3).result()


def merged(method: str, paths: Sequence[Path], options: Sequence[str]) -> dict[str, float]:
    out = WORK / f"out-{method}"
    command = [sys.executable, "-m", "covmerge", "merge", "--base", str(paths[0])]
    for path in paths[1:]:
        command += ["--expert", f"{path.name}={path}"]
    command += ["--method", method, *options, "--overwrite", str(out)]
    timing = spawn(command, log=WORK / f"{method}.log")
    shutil.rmtree(out)
    return timing


if __name__ == "__main__":
    main()
