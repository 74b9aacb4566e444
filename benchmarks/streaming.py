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
from pathlib import Path

from benchmarks.measure import machine, spawn
from benchmarks.models import LLAMA, apart, write_checkpoints

WORK = Path(__file__).parent / "work"
RESULTS = Path(__file__).parent / "results"

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
    config = {**LLAMA, "num_hidden_layers": layers}
    return apart(write_checkpoints, WORK / f"llama-{layers}x3", config, 3)


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
