"""What a command takes beside its mathematics: its start, reading, hashes and checks. Two builds in turns.

    python -m benchmarks.start --before DIR/src [--rounds 5] [--out FILE.json]

A model of two layers of 64 inputs, a copy with other weights, and an adapter of rank 4; and an average of
three files of 105 MB. CPU seconds and seconds of whole processes, medians of the rounds; `now / before`
is of the medians. `torch` is a process that imports torch, as all but `--help` do.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.kernels import RESULTS
from benchmarks.measure import machine, spawn
from benchmarks.spectra import OWN, check, commit

WIDTH, LAYERS, RANK = 64, 2, 4
LARGE = 2560


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the `src` of another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "start.json")
    arguments = parser.parse_args()
    check(parser, arguments)
    trees = {"before": arguments.before.resolve(), "now": OWN}
    for tree in trees.values():
        compileall.compile_dir(tree / "covmerge", quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        asked = commands(Path(folder))
        runs: list[Mapping[str, Mapping[str, Any]]] = []
        for _ in range(arguments.rounds):
            runs.append(
                {
                    name: {
                        tree: spawn(command, env={**os.environ, "PYTHONPATH": str(source)})
                        for tree, source in trees.items()
                    }
                    for name, command in asked.items()
                }
            )
            print(len(runs), flush=True)
    rows = [row(name, [run[name] for run in runs]) for name in asked]
    for one in rows:
        print(one)
    result = {
        "command": f"python -m benchmarks.start --before DIR/src --rounds {arguments.rounds}",
        "before": commit(arguments.before),
        "now": commit(OWN),
        "machine": machine(),
        "commands": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def commands(folder: Path) -> dict[str, list[str]]:
    save(folder)
    covmerge = [sys.executable, "-m", "covmerge"]
    sources = [f"--base={folder / 'base'}", f"--expert=a={folder / 'full'}"]
    recipe = folder / "recipe.yml"
    recipe.write_text("base: ./base\nexperts: {a: ./full, b: ./adapter}\nmethod: average\n")
    merge = [*covmerge, "merge", f"--base={folder / 'base'}", f"--expert=a={folder / 'adapter'}"]
    out = str(folder / "out")
    return {
        "torch": [sys.executable, "-c", "import torch"],
        "--help": [*covmerge, "--help"],
        "merge of an adapter": [*merge, out, "--overwrite"],
        "verify": [*covmerge, "verify", out],
        "inspect --json": [*covmerge, "inspect", "--json", *sources],
        "plan": [*covmerge, "plan", str(recipe)],
        "merge --dry-run": [*merge, "--dry-run"],
        "average of three files": [
            *(*covmerge, "merge", f"--base={folder / 'large0.safetensors'}", "--method=average"),
            *(f"--expert={n}={folder / f'large{n}.safetensors'}" for n in (1, 2)),
            *(str(folder / "large"), "--overwrite"),
        ],
    }


def save(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    matrices = [f"layers.{n}.{part}_proj" for n in range(LAYERS) for part in "qkvo"]
    base = {f"{name}.weight": torch.randn(WIDTH, WIDTH, generator=draw) for name in matrices}
    full = {name: w + 0.01 * torch.randn(w.shape, generator=draw) for name, w in base.items()}
    factors = {
        f"base_model.model.{name}.lora_{side}.weight": torch.randn(shape, generator=draw)
        for name in matrices
        for side, shape in (("A", (RANK, WIDTH)), ("B", (WIDTH, RANK)))
    }
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [f"{part}_proj" for part in "qkvo"],
    }
    stored = {"base": ("model", base), "full": ("model", full)}
    stored |= {"adapter": ("adapter_model", factors)}
    for name, (stem, tensors) in stored.items():
        (folder / name).mkdir()
        save_file(tensors, folder / name / f"{stem}.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    large = {
        f"layers.{n}.q_proj.weight": torch.randn(LARGE, LARGE, generator=draw) for n in range(4)
    }
    for number in range(3):
        moved = {name: weight * (1 + 0.01 * number) for name, weight in large.items()}
        save_file(moved, folder / f"large{number}.safetensors")


def row(name: str, runs: list[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"command": name}
    for key in ("cpu_seconds", "seconds"):
        before, now = (median(run[tree][key] for run in runs) for tree in ("before", "now"))
        found[key] = {"before": before, "now": now, "now / before": round(now / before, 2)}
    return found


if __name__ == "__main__":
    main()
