"""Eigenproblems before and after: merges of one layer by two trees of covmerge, in turns.

    python -m benchmarks.spectra --before DIR/src [--rounds 1] [--out FILE.json]

The four matrices of a ViT-B/16 block with 8 experts, as in `benchmarks.kernels`, by the methods that
decompose spectra. Both trees have a process of their own, with one thread, and are asked in turn, layer
by layer: CPU seconds of the merge, and how many of them LAPACK's eigenproblems and singular value
decompositions took.
`difference` is ‖after − before‖ / ‖before‖.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import BLOCKS, KINDS, RESULTS, experts
from benchmarks.measure import machine

METHODS = ("tsv_m", "dc_merge", "cart", "resmerge", "iso_c", "iso_cts", "actmat")
SOLVERS = ("eigh", "eigvalsh", "svd", "svdvals")
BLOCK = "vit-b16"
LAB = Path(__file__).parent.parent
OWN = LAB.parent / "src"
NUMBERS = ("cpu_seconds", "eigen_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the folder that has the other covmerge")
    parser.add_argument("--kinds", nargs="+", default=["homogeneous", "decaying"], choices=KINDS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "spectra.json")
    parser.add_argument("--serve", action="store_true", help="answer on standard input")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.before is None:
        parser.error("--before is missing: the `src` of another checkout")
    check(parser, arguments)
    count, shapes = BLOCKS[BLOCK]
    trees = {"before": Tree(arguments.before), "after": Tree(OWN)}
    rows = []
    for kind in arguments.kinds:
        for layer, shape in shapes.items():
            for method in arguments.methods:
                row = {"kind": kind, "layer": layer, "shape": shape, "method": method}
                row |= compared(trees, [kind, shape, count, method], arguments.rounds)
                rows.append(row)
                print(row, flush=True)
    result = {
        "command": "python -m benchmarks.spectra --before DIR/src",
        "before": commit(arguments.before),
        "machine": machine() | {"threads": 1},
        "experts": count,
        "blocks": totals(rows),
        "layers": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for total in result["blocks"]:
        print(total)


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse, before minutes of measuring, what would come to nothing or measure one tree twice."""
    if not (arguments.before / "covmerge").is_dir():
        parser.error(
            f"--before {arguments.before} has no folder covmerge: name the `src` of a checkout"
        )
    try:
        commit(arguments.before)
    except subprocess.CalledProcessError as error:
        parser.error(
            f"--before {arguments.before}: git names no commit of it: {error.stderr.strip()}"
        )
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    if not arguments.out.parent.is_dir():
        parser.error(f"--out {arguments.out}: there is no folder {arguments.out.parent}")


def commit(source: Path) -> str:
    """The commit that a source tree is of."""
    told = ["git", "-C", str(source), "describe", "--always", "--dirty"]
    return subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()


class Tree:
    """A process that merges layers by the covmerge of one tree."""

    def __init__(self, source: Path) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{source.resolve()}:{LAB}"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spectra", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )

    def ask(self, question: object) -> dict[str, Any]:
        """The answer to one line of `serve`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """Merge the layer that each line asks for, and answer with its times and where the result lies."""
    from covmerge import merge_layer

    inside = [0.0]
    for name in SOLVERS:
        setattr(torch.linalg, name, counted(getattr(torch.linalg, name), inside))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "merged.npy"
        last, updates = None, []
        for line in sys.stdin:
            kind, shape, count, method = json.loads(line)
            if last != (kind, shape):
                last, updates = (kind, shape), experts(kind, tuple(shape), count)
            inside[0], start = 0.0, time.process_time()
            merged = merge_layer(updates, method)
            times = (time.process_time() - start, inside[0])
            np.save(result, merged.numpy())
            answer = dict(zip(NUMBERS, times, strict=True)) | {"result": str(result)}
            print(json.dumps(answer), flush=True)


def counted(solver: Callable[..., Any], inside: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        found = solver(*args, **kwargs)
        inside[0] += time.process_time() - start
        return found

    return run


def compared(trees: Mapping[str, Tree], question: object, rounds: int) -> dict[str, Any]:
    answers = [{name: tree.ask(question) for name, tree in trees.items()} for _ in range(rounds)]
    row: dict[str, Any] = {
        name: {key: round(median(answer[name][key] for answer in answers), 4) for key in NUMBERS}
        for name in trees
    }
    before, after = (np.load(answers[-1][name]["result"]) for name in trees)
    row["difference"] = float(np.linalg.norm(after - before) / np.linalg.norm(before))
    return row


def totals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sums over the layers, by kind and method."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["kind"], row["method"]), []).append(row)
    result = []
    for (kind, method), own in found.items():
        row: dict[str, Any] = {"block": BLOCK, "kind": kind, "method": method}
        for tree in ("before", "after"):
            row[tree] = {key: round(sum(r[tree][key] for r in own), 3) for key in NUMBERS}
            cpu, eigen = (row[tree][key] for key in NUMBERS)
            row[tree]["share in eigensolvers"] = round(eigen / cpu, 2)
        row["before / after"] = round(row["before"]["cpu_seconds"] / row["after"]["cpu_seconds"], 2)
        row["largest difference"] = max(r["difference"] for r in own)
        result.append(row)
    return result


if __name__ == "__main__":
    main()
