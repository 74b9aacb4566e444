"""Peak memory against the size of the model, at one largest tensor; and merges within --max-memory.

    python -m benchmarks.streaming [--methods average ace] [--layers 2 4 22] [--max-memory 800]
    python -m benchmarks.streaming --methods average ties --layers 58 --experts 4 --max-memory 520 \
        --cold --out benchmarks/results/streaming-tenfold.json

bfloat16 experts of Llama-shaped bases of more and more layers, every merge in a process of its
own, the way a user starts it. The floor reads the same checkpoints tensor by tensor, sums them in
float32, and writes nothing. ACE is left out of models of more than four layers: its work grows with
them, its memory does not. The last row gives `--max-memory`, and the bytes of one model over it: in the
second command, whose files take 27 GB, more than ten.

With `--cold` no input is in the page cache when a process starts; where they are larger than the
machine's memory, bytes read from the disk beyond theirs were read twice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.measure import cool, machine, spawn
from benchmarks.models import LLAMA, WORK, checkpoints

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
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 4, 22])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--max-memory", type=int, default=800, help="MB, of the largest model")
    parser.add_argument("--cold", action="store_true", help="begin with an empty page cache")
    parser.add_argument("--out", type=Path, default=RESULTS / "streaming.json")
    arguments = parser.parse_args()
    rows = []
    for layers in arguments.layers:
        paths = checkpoints(LLAMA, arguments.experts, layers=layers)
        files = [path / "model.safetensors" for path in paths]
        cold = files if arguments.cold else []
        size = sum(file.stat().st_size for file in files)
        cool(cold)
        floor = spawn([sys.executable, "-c", FLOOR, *map(str, files)], log=WORK / "floor.log")
        shown = {"layers": layers, "bytes_read": size}
        rows.append({**shown, "what": "read and sum", **floor})
        limit = f"{arguments.max_memory}MB"
        merges = [(method, []) for method in arguments.methods if method != "ace" or layers <= 4]
        if layers == max(arguments.layers):
            merges.append(("average", ["--max-memory", limit]))
        for method, options in merges:
            timing = merged(method, paths, options, cold)
            row = {**shown, "what": " ".join([method, *options]), **timing}
            row["seconds / read and sum"] = round(row["seconds"] / floor["seconds"], 2)
            if options:
                row["model / max_memory"] = round(
                    size / len(paths) / (arguments.max_memory * 1e6), 1
                )
            rows.append(row)
        print(*rows[-len(merges) - 1 :], sep="\n", flush=True)
    command = " ".join(["python -m benchmarks.streaming", *sys.argv[1:]])
    about = machine() | {"memory": psutil.virtual_memory().total}
    result = {"command": command, "machine": about, "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def merged(
    method: str, paths: Sequence[Path], options: Sequence[str], cold: Sequence[Path]
) -> dict[str, float]:
    out = WORK / f"out-{method}"
    command = [sys.executable, "-m", "covmerge", "merge", "--base", str(paths[0])]
    for path in paths[1:]:
        command += ["--expert", f"{path.name}={path}"]
    log = WORK / f"{method}.log"
    spawn([*command, "--dry-run"], log=log)  # the first of an architecture imports transformers
    cool(cold)
    timing = spawn([*command, "--method", method, *options, "--overwrite", str(out)], log=log)
    shutil.rmtree(out)
    return timing


if __name__ == "__main__":
    main()
