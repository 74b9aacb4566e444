"""What `auto` costs beside `ace`, layer by layer.

    python -m benchmarks.auto_beside_ace [--rounds 2] [--kinds homogeneous heterogeneous decaying]
                                         [--threads 1] [--out FILE.json]

The updates of `benchmarks.kernels`, 8 experts, in float32; CPU seconds of all threads, the best of some
rounds in which all take turns. Of `heterogeneous` updates ACE refines the spectrum, of the others not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels import KINDS, RESULTS, experts, timed
from benchmarks.measure import machine
from covmerge import merge_layer

SHAPES = ((768, 768), (3072, 768), (768, 3072))
COUNT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "auto_beside_ace.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, object]] = []
    for kind in arguments.kinds:
        for shape in SHAPES:
            updates = experts(kind, shape, COUNT)
            seconds = best(merges(updates), arguments.rounds)
            row = {name: round(own, 3) for name, own in seconds.items()}
            rows.append({"kind": kind, "shape": shape, "experts": COUNT, "CPU seconds": row})
            ace = seconds.pop("ace")
            told = (f"{name} {own:.3f} ({own / ace:.2f} of ace)" for name, own in seconds.items())
            print(f"{kind} {shape[0]} × {shape[1]}: ace {ace:.3f}, {', '.join(told)}", flush=True)
    result = {
        "command": " ".join(("python -m benchmarks.auto_beside_ace", *sys.argv[1:])),
        "machine": machine(),
        "layers": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def merges(updates: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """What takes turns."""
    return {
        "ace": lambda: merge_layer(updates, "ace"),
        "auto": lambda: merge_layer(updates, "auto"),
    }


def best(runs: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """The least CPU seconds of each."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            found[name] = min(found[name], timed(run, "cpu")[1]["cpu_seconds"])
    return found


if __name__ == "__main__":
    main()
