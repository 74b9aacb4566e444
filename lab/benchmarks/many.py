"""Many sources at once: 64 full models, and 500 and 2,000 adapters, merged from disk by the command line.

    python -m benchmarks.many --work DIR

A Llama of four layers and of width 512, in bfloat16 (15.6M parameters). The full models differ from it by
random numbers; an adapter is a LoRA of rank 8 of the queries and values of each layer. Every merge is a
process of its own, as a user starts it. Written into results/many.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from benchmarks.measure import machine, spawn
from benchmarks.models import LLAMA, llama_shapes

OUT = Path(__file__).parent / "results" / "many.json"
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
CONFIG: dict[str, Any] = {**LLAMA, **SIZES, "num_hidden_layers": 4, "vocab_size": 2000}
RANK = 8
RUNS = (
    ("full", 64, "average"),
    ("full", 64, "auto"),
    ("adapters", 500, "average"),
    ("adapters", 500, "auto"),
    ("adapters", 2000, "average"),
)


def base(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A random model."""
    shapes = llama_shapes(CONFIG)
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_full(path: Path, number: int) -> None:
    """The base, or an expert of it."""
    tensors = base(torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(number)
    for tensor in tensors.values() if number else ():
        tensor.add_(torch.randn(tensor.shape, generator=own), alpha=1e-3)
    path.mkdir(parents=True)
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(CONFIG))


def write_adapter(path: Path, number: int) -> None:
    """An adapter, in the form of PEFT."""
    own = torch.Generator().manual_seed(number)
    tensors = {}
    matrices = {name: shape for name, shape in llama_shapes(CONFIG).items() if len(shape) == 2}
    for name, (out, inputs) in matrices.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = (
                torch.randn(RANK, inputs, generator=own) / inputs**0.5
            )
            tensors[f"{stem}.lora_B.weight"] = 0.02 * torch.randn(out, RANK, generator=own)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))


def sources(work: Path, kind: str, count: int) -> dict[str, str]:
    """So many experts of a kind, written unless they are there."""
    if not (work / "base").exists():
        write_full(work / "base", 0)
    found = {f"e{n}": str(work / kind / str(n)) for n in range(1, count + 1)}
    for number, path in enumerate(found.values(), 1):
        if not Path(path).exists():
            (write_full if kind == "full" else write_adapter)(Path(path), number)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    rows = []
    for kind, count, method in RUNS:
        experts = sources(work, kind, count)
        recipe = {"base": str(work / "base"), "experts": experts, "method": method}
        (work / "recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        argv = [sys.executable, "-m", "covmerge", "merge", str(work / "recipe.yml"), str(out)]
        took = spawn(argv, log=work / "log.txt")
        rows.append({"kind": kind, "count": count, "method": method, **took})
        print(rows[-1], flush=True)
    result = {
        "command": "python -m benchmarks.many --work DIR",
        "machine": machine(),
        "rank": RANK,
        "rows": rows,
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
