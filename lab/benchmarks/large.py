"""Layers of language models: two builds in turns, beside what their products take.

    python -m benchmarks.large --beside DIR/src [--shapes 2048x2048 ...] [--methods ace ...] [--rounds 2]

One layer of three experts by `covmerge.merge_layer`, on one thread. The updates are those of
`benchmarks.kernels`, leading directions and noise: `heterogeneous`, of unequal norms, so that ACE refines
and ACTMat cuts off, or another `--kind`. Each merge has a process of its own, and both builds take
turns; the least CPU seconds of the rounds count.

`products` are counted FLOPs over this machine's rate of float32 products, measured in every round: T
Gram matrices by symmetry, T right-hand sides, one Cholesky factor, one solve. `peak_bytes` is of the whole
process, with its updates. `difference` is ‖now − before‖ / ‖before‖. Layers that are measured again
replace their rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import KINDS, RESULTS, experts
from benchmarks.measure import machine
from benchmarks.spectra import LAB, OWN, check, commit

COUNT = 3
ALL = ("ace", "auto", "actmat", "aswudi", "tsv_m", "dc_merge", "iso_c")
SHAPES = ("2048x2048", "2048x5632", "4096x4096", "14336x4096")
RATE_SIDE = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--beside", dest="before", type=Path, help="the other build's folder")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(ALL))
    parser.add_argument("--kind", default="heterogeneous", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "large.json")
    parser.add_argument("--one", type=Path, help="merge one layer, and leave it here")
    arguments = parser.parse_args()
    if arguments.one is not None:
        asked_for = arguments.kind, arguments.shapes[0], arguments.methods[0]
        print(json.dumps(merged(*asked_for, arguments.one)))
        return
    if arguments.before is None:
        parser.error("--beside is missing: the `src` of another checkout")
    check(parser, arguments)
    rows = stored(arguments.out)
    for shape in arguments.shapes:
        for method in arguments.methods:
            question = arguments.kind, shape, method
            row = compared(arguments.before, question, arguments.rounds)
            rows[question] = row
            print(row, flush=True)
            result = {
                "command": "python -m benchmarks.large --beside DIR/src",
                "before": commit(arguments.before),
                "now": commit(OWN),
                "machine": machine() | {"threads": 1},
                "experts": COUNT,
                "layers": list(rows.values()),
            }
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def stored(path: Path) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    """What was measured before, by kind, shape and method."""
    rows = json.loads(path.read_text())["layers"] if path.exists() else []
    return {(row["kind"], "x".join(map(str, row["shape"])), row["method"]): row for row in rows}


def merged(kind: str, shape: str, method: str, out: Path) -> dict[str, float]:
    """CPU seconds of one merge, in this process, and the most memory that the process had."""
    from covmerge import merge_layer

    torch.set_num_threads(1)
    updates = experts(kind, sides(shape), COUNT)
    start = time.process_time()
    found = merge_layer(updates, method)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    np.save(out, found.numpy())
    return {"cpu_seconds": seconds, "peak_bytes": peak * 1024, "rate": rate()}


def rate() -> float:
    """FLOPs a second of products in float32."""
    square = torch.randn(RATE_SIDE, RATE_SIDE)
    square @ square
    start = time.process_time()
    square @ square
    return 2.0 * RATE_SIDE**3 / (time.process_time() - start)


def compared(before: Path, question: tuple[str, str, str], rounds: int) -> dict[str, Any]:
    kind, shape, method = question
    trees = {"before": before, "now": OWN}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.npy" for name in trees}
        runs = [
            {name: asked(tree, question, files[name]) for name, tree in trees.items()}
            for _ in range(rounds)
        ]
        found = {name: np.load(file) for name, file in files.items()}
    least = {
        name: {
            "cpu_seconds": round(min(run[name]["cpu_seconds"] for run in runs), 2),
            "peak_bytes": max(run[name]["peak_bytes"] for run in runs),
        }
        for name in trees
    }
    fastest = max(run[name]["rate"] for run in runs for name in trees)
    off = np.linalg.norm(found["now"] - found["before"]) / np.linalg.norm(found["before"])
    seconds = [least[name]["cpu_seconds"] for name in trees]
    return {
        "kind": kind,
        "shape": sides(shape),
        "method": method,
        **least,
        "products": round(products(*sides(shape)) / fastest, 2),
        "before / now": round(seconds[0] / seconds[1], 2),
        "difference": float(off),
    }


def asked(tree: Path, question: tuple[str, str, str], out: Path) -> dict[str, float]:
    """`merged` by the covmerge of one tree."""
    kind, shape, method = question
    path = f"{tree.resolve()}:{LAB}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "benchmarks.large", f"--one={out}"]
    command += [f"--kind={kind}", f"--shapes={shape}", f"--methods={method}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=env, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def products(d_out: int, d_in: int) -> float:
    """FLOPs of sums and one solve, in the cheaper order of products."""
    inner = 3.0 * d_out * d_in * d_in
    outer = 3.0 * d_out * d_out * d_in + 1.0 * d_out * d_in * d_in
    return COUNT * min(inner, outer) + d_in**3 / 3 + 2.0 * d_out * d_in * d_in


def sides(shape: str) -> tuple[int, int]:
    d_out, d_in = map(int, shape.split("x"))
    return d_out, d_in


if __name__ == "__main__":
    main()
