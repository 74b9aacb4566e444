"""What `--dry-run` says a merge will take, beside what it took.

    python -m benchmarks.forecast [--layers 4] [--methods auto ace ties average] [--rounds 2] [--out FILE]

A model of Llama's shape, half as wide as TinyLlama, and three experts in bfloat16, by the command line:
a forecast, then the merge, in turns. The forecast is of a machine that does nothing else. `idle` is what
the merge took of such a one: the start on one core, and all other processor seconds on every core alike.
`seconds` is by the clock, on this machine as busy as it was (`share`: what the forecast got of it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, spawn, spread
from benchmarks.models import LLAMA, checkpoints

RESULTS = Path(__file__).parent / "results"
METHODS = ("auto", "ace", "ties", "average")
HALF = {
    **LLAMA,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "vocab_size": 16000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "forecast.json")
    given = parser.parse_args()
    base, *experts = checkpoints(HALF, 3, layers=given.layers)
    sources = [f"--base={base}", *(f"--expert={path.name}={path}" for path in experts)]
    rows: list[dict[str, Any]] = []
    for method in given.methods:
        runs = [beside([*sources, f"--method={method}"]) for _ in range(given.rounds)]
        rows.append({"method": method, **spread(runs)})
        print(method, {key: round(rows[-1][key]["median"], 2) for key in runs[0]}, flush=True)
        result = {
            "command": f"python -m benchmarks.forecast --layers {given.layers} --rounds {given.rounds}",
            "machine": machine(),
            "layers": given.layers,
            "merges": rows,
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")


def beside(arguments: list[str]) -> dict[str, float]:
    """A forecast and its merge."""
    covmerge = [sys.executable, "-m", "covmerge", "merge", *arguments]
    said = subprocess.run([*covmerge, "--dry-run", "--json"], stdout=subprocess.PIPE, check=True)
    foreseen = json.loads(said.stdout)["estimate"]
    with tempfile.TemporaryDirectory() as folder:
        took = spawn([*covmerge, str(Path(folder) / "out")])
    start = foreseen["start_seconds"]
    idle = start + (took["cpu_seconds"] - start) / (os.cpu_count() or 1)
    return {
        "forecast": foreseen["seconds"],
        "share": foreseen["processor_share"],
        "seconds": took["seconds"],
        "cpu_seconds": took["cpu_seconds"],
        "idle": idle,
        "forecast / idle": foreseen["seconds"] / idle,
    }


if __name__ == "__main__":
    main()
