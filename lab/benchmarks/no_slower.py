"""Is any method slower than it was? Merges of layers by all of them, by two trees of covmerge, in turns.

    python -m benchmarks.no_slower --before DIR/src [--rounds 3] [--out FILE.json]

Three matrices of a small encoder (MiniLM) with 8 experts, of the three kinds of updates that
`benchmarks.kernels` explains, by every method that needs nothing but the updates. CPU seconds with one
thread, the least of the rounds. `difference` is ‖after − before‖ / ‖before‖: above 0 the trees do not
compute the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import KINDS, RESULTS
from benchmarks.measure import machine
from benchmarks.spectra import OWN, Tree, check, commit
from covmerge.methods import registry

SHAPES = ((384, 384), (1536, 384), (384, 1536))
EXPERTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the `src` of another checkout")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--methods", nargs="+", default=everyone(), choices=everyone())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "no_slower.json")
    arguments = parser.parse_args()
    check(parser, arguments)
    trees = {"before": Tree(arguments.before), "after": Tree(OWN)}
    rows: list[dict[str, Any]] = []
    for kind, shape, method in product(arguments.kinds, SHAPES, arguments.methods):
        found = least(trees, [kind, shape, EXPERTS, method], arguments.rounds)
        rows.append({"kind": kind, "shape": shape, "method": method} | found)
        print(rows[-1], flush=True)
    result = {
        "command": f"python -m benchmarks.no_slower --before DIR/src --rounds {arguments.rounds}",
        "before": commit(arguments.before),
        "machine": machine() | {"threads": 1},
        "experts": EXPERTS,
        "methods": totals(rows),
        "layers": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for total in result["methods"]:
        print(total)


def everyone() -> list[str]:
    return [
        method.name for method in registry if method.data == "none" and method.sees == "updates"
    ]


def least(trees: Mapping[str, Tree], question: object, rounds: int) -> dict[str, Any]:
    """The least CPU seconds of each tree, and how far their results are from one another."""
    answers = [{name: tree.ask(question) for name, tree in trees.items()} for _ in range(rounds)]
    row = {name: round(min(own[name]["cpu_seconds"] for own in answers), 4) for name in trees}
    before, after = (np.load(answers[-1][name]["result"]) for name in trees)
    difference = float(np.linalg.norm(after - before) / np.linalg.norm(before))
    return row | {
        "before / after": round(row["before"] / row["after"], 2),
        "difference": difference,
    }


def totals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By method: all its layers together, and the one that has lost most."""
    result = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        before, after = (round(sum(row[tree] for row in own), 3) for tree in ("before", "after"))
        worst = min(own, key=lambda row: row["before / after"])
        result.append(
            {
                "method": method,
                "before": before,
                "after": after,
                "before / after": round(before / after, 2),
                "least of a layer": worst["before / after"],
                "which": f"{worst['kind']}, {'×'.join(map(str, worst['shape']))}",
                "largest difference": max(row["difference"] for row in own),
            }
        )
    return result


if __name__ == "__main__":
    main()
