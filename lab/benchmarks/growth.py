"""How the time of a merge grows: with experts, width, layers and rank, beside what theory says.

    python -m benchmarks.growth [--rounds 2] [--out FILE.json]

One thing is varied at a time; every point is the least of a few rounds, interleaved. The exponent is
the slope of log time over log size between the two ends of the upper half of the range, where fixed
costs no longer show. Theory counts the FLOPs of the dispatch table (`covmerge explain`) over the
same range, so that lower powers are in both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path

import torch
from torch import Tensor

import covmerge
from benchmarks.measure import machine
from covmerge import LowRank, merge_layer
from covmerge.maths.linalg.auto import factored_choice
from covmerge.methods import registry

RESULTS = Path(__file__).parent / "results"
METHODS = ("average", "ties", "ace", "actmat", "iso_c", "tsv_m")
EXPERTS, WIDTH, LAYERS = 8, 768, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "growth.json")
    arguments = parser.parse_args()
    methods, rounds = arguments.methods, arguments.rounds
    curves = [
        *varied("experts", (2, 4, 8, 16, 32), lambda n: updates(n, 512), methods, rounds),
        *varied("width", (128, 256, 512, 1024, 2048), lambda n: updates(4, n), methods, rounds),
        *by_layers((3, 6, 12, 24), methods, rounds),
        *by_rank((4, 8, 16, 32, 64), ("average", "ace", "actmat"), rounds),
    ]
    for curve in curves:
        print(curve["varied"], curve["method"], curve["exponent"], curve["theory"], flush=True)
    result = {"command": "python -m benchmarks.growth", "machine": machine(), "curves": curves}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def updates(count: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [0.01 * torch.randn(width, width, generator=generator) for _ in range(count)]


def varied(
    what: str,
    sizes: Sequence[int],
    make: Callable[[int], list[Tensor]],
    methods: Sequence[str],
    rounds: int,
) -> list[dict[str, object]]:
    """One square layer, merged by every method at every size."""
    given = {size: make(size) for size in sizes}

    def run(method: str, size: int) -> None:
        merge_layer(given[size], method)

    def flops(method: str, size: int) -> float:
        count, side = len(given[size]), len(given[size][0])
        return registry.get(method).cost(side, side, count, 4).flops

    return curves(what, sizes, methods, rounds, run, flops)


def by_layers(sizes: Sequence[int], methods: Sequence[str], rounds: int) -> list[dict[str, object]]:
    """Whole models in memory, of more and more layers."""
    layer = updates(EXPERTS, 384)

    def model(count: int, values: Tensor) -> dict[str, Tensor]:
        return {f"layers.{n}.mlp.up_proj.weight": values for n in range(count)}

    def run(method: str, size: int) -> None:
        base = model(size, torch.zeros_like(layer[0]))
        experts = {f"e{t}": model(size, update) for t, update in enumerate(layer)}
        covmerge.merge(base, experts, method)

    return curves("layers", sizes, methods, rounds, run, lambda method, size: float(size))


def by_rank(sizes: Sequence[int], methods: Sequence[str], rounds: int) -> list[dict[str, object]]:
    """Adapters of a layer of a 7B model, on their factors."""
    width = 4096
    generator = torch.Generator().manual_seed(0)

    def factor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = {
        rank: [LowRank(factor(width, rank), factor(rank, width)) for _ in range(EXPERTS)]
        for rank in sizes
    }

    def flops(method: str, size: int) -> float:
        return factored_choice(width, width, [size] * EXPERTS, 4).cost.flops

    return curves(
        "rank", sizes, methods, rounds, lambda m, size: merge_layer(given[size], m), flops
    )


def curves(
    what: str,
    sizes: Sequence[int],
    methods: Sequence[str],
    rounds: int,
    run: Callable[[str, int], object],
    flops: Callable[[str, int], float],
) -> list[dict[str, object]]:
    found: dict[str, list[float]] = {method: [float("inf")] * len(sizes) for method in methods}
    for _ in range(rounds):
        for place, size in enumerate(sizes):
            for method in methods:
                start = time.perf_counter()
                run(method, size)
                found[method][place] = min(found[method][place], time.perf_counter() - start)
    return [
        {
            "varied": what,
            "method": method,
            "sizes": list(sizes),
            "seconds": [round(value, 5) for value in seconds],
            "exponent": round(slope(sizes, seconds), 2),
            "theory": round(slope(sizes, [flops(method, size) for size in sizes]), 2),
        }
        for method, seconds in found.items()
    ]


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Exponent between the middle of the range and its end."""
    middle = (len(sizes) - 1) // 2
    return log(values[-1] / values[middle]) / log(sizes[-1] / sizes[middle])


if __name__ == "__main__":
    main()
