"""Merge three Llama-shaped experts from disk: peak memory, and time beside a bare read-and-sum.

    python -m benchmarks.streaming [--layers 22] [--methods ace average] [--out FILE.json]

Everything is measured in one run, each merge in a process of its own, the way a user starts it:
wall-clock time and peak resident memory come from the operating system. The floor reads the same
four checkpoints tensor by tensor, sums them in float32, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import save_file

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


def measured(command: list[str], log: Path) -> dict[str, float]:
    """Run a command; return its wall-clock seconds, CPU seconds and peak resident memory."""
    start = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_memory_gb": usage.ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["ace", "average"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "streaming.json")
    args = parser.parse_args()

    config = {**CONFIG, "num_hidden_layers": args.layers}
    folder = WORK / f"llama-{args.layers}x{args.experts}"
    # In a process of its own: a child inherits its parent's peak memory as its own.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        paths = pool.submit(make_checkpoints, folder, config, args.experts).result()
    files = [str(path / "model.safetensors") for path in paths]
    size = sum(Path(file).stat().st_size for file in files)
    rows: dict[str, list[dict[str, float]]] = {"read_and_sum": []}
    for _ in range(args.repeats):
        floor = [sys.executable, "-c", FLOOR, *files]
        rows["read_and_sum"].append(measured(floor, WORK / "floor.log"))
        for method in args.methods:
            command = [sys.executable, "-m", "covmerge", "merge", "--base", str(paths[0])]
            for path in paths[1:]:
                command += ["--expert", f"{path.name}={path}"]
            command += ["--method", method, "--overwrite", str(WORK / f"out-{method}")]
            rows.setdefault(method, []).append(measured(command, WORK / f"{method}.log"))
            shutil.rmtree(WORK / f"out-{method}")
    for name, runs in rows.items():
        best = min(runs, key=lambda run: run["wall_s"])
        print(name, {key: round(value, 2) for key, value in best.items()}, file=sys.stderr)
    result = {
        "command": "python -m benchmarks.streaming " + " ".join(sys.argv[1:]),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "checkpoints": {"experts": args.experts, "dtype": "bfloat16", "bytes_read": size},
        "runs": rows,
        "ratio_to_read_and_sum": {
            name: min(r["wall_s"] for r in runs) / min(r["wall_s"] for r in rows["read_and_sum"])
            for name, runs in rows.items()
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
