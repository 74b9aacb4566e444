"""Eight adapters of rank 16 over layers of a 7B shape, written as a full model: LoRA, LoHa, and one DoRA.

    python -m benchmarks.adapter_folds [--layers 1] [--max-memory 1GB] [--rounds 3]

The base is a sparse file of bfloat16 zeros. Every merge is a process of its own, in turns with the others;
the least seconds count. `loha / lora` is what eight LoHa cost beside eight LoRA. The peaks are those of
the processes, in and without `--max-memory`.
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
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.adapters import COUNT, RANK, RESULTS, SHAPES, WORK, make

_WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--max-memory", default="1GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "adapter_folds.json")
    arguments = parser.parse_args()
    base, lora = make(arguments.layers)
    (base / "config.json").unlink()  # layers alone are no model, which covmerge would say
    loha = [as_loha(folder, number) for number, folder in enumerate(lora)]
    dora = [as_dora(lora[0])]
    kinds = {"8 lora": lora, "8 loha": loha, "1 lora": lora[:1], "1 dora": dora}
    merge(base, lora, None)  # the one that asks transformers for the layers
    runs: dict[str, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for kind, folders in kinds.items():
            for limit in (None, arguments.max_memory):
                name = f"{kind}, --max-memory {limit}" if limit else kind
                found = merge(base, folders, limit)
                best = runs.setdefault(name, found)
                runs[name] = {key: min(best[key], value) for key, value in found.items()}
                print(name, found, flush=True)
    limited = f", --max-memory {arguments.max_memory}"
    weights = sum(2 * d_out * d_in for d_out, d_in in SHAPES.values()) * arguments.layers
    results = {
        "shape": {"layers": arguments.layers, "adapters": COUNT, "rank": RANK},
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "base_bytes": weights,
        "merges": runs,
        "loha / lora": ratio(runs, "8 loha", "8 lora"),
        "loha / lora, limited": ratio(runs, f"8 loha{limited}", f"8 lora{limited}"),
        "dora / lora": ratio(runs, "1 dora", "1 lora"),
    }
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    shutil.rmtree(WORK)


def ratio(runs: dict[str, dict[str, float]], one: str, other: str) -> float:
    return round(runs[one]["merging_seconds"] / runs[other]["merging_seconds"], 2)


def as_loha(lora: Path, number: int) -> Path:
    """The same layers by LoHa: two products of the LoRA's size each, multiplied."""
    folder = lora.with_name(f"loha{number}")
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for key, value in load_file(lora / _WEIGHTS).items():
        module, end = key.rsplit(".lora_", 1)
        side = "b" if end.startswith("A") else "a"
        for half in "12":
            drawn = torch.randn(value.shape, generator=generator) * 0.1
            tensors[f"{module}.hada_w{half}_{side}"] = drawn.bfloat16()
    return written(folder, tensors, lora, peft_type="LOHA", alpha=RANK)


def as_dora(lora: Path) -> Path:
    """The LoRA with a magnitude of every output."""
    tensors = load_file(lora / _WEIGHTS)
    ups = {key: value for key, value in tensors.items() if key.endswith("lora_B.weight")}
    for key, value in ups.items():
        name = key.replace("lora_B.weight", "lora_magnitude_vector")
        tensors[name] = torch.rand(len(value)) + 1
    return written(lora.with_name("dora"), tensors, lora, use_dora=True)


def written(folder: Path, tensors: dict[str, torch.Tensor], like: Path, **fields: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / _WEIGHTS)
    config = json.loads((like / "adapter_config.json").read_text()) | fields
    if fields.get("peft_type") == "LOHA":
        del config["lora_alpha"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(base: Path, adapters: list[Path], limit: str | None) -> dict[str, float]:
    out = WORK / "out"
    shutil.rmtree(out, ignore_errors=True)
    sources = [f"--expert=e{number}={path}" for number, path in enumerate(adapters)]
    command = [sys.executable, "-m", "covmerge", "merge", "--base", str(base), *sources]
    command += ["--method", "linear", "--json", str(out)]
    command += ["--max-memory", limit] if limit else []
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stderr)
    run = json.loads(done.stdout)["run"]
    return {
        "seconds": round(seconds, 2),
        "merging_seconds": round(run["seconds"], 2),
        "peak_bytes": run["peak_memory"],
    }


if __name__ == "__main__":
    main()
