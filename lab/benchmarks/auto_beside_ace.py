"""What `auto` costs beside `ace`, layer by layer, with and without the base's inputs.

    python -m benchmarks.auto_beside_ace [--rounds 2] [--kinds homogeneous heterogeneous decaying]

The updates of `benchmarks.kernels`, 8 experts, in float32, on one core; CPU seconds, the best of some
rounds in which all take turns. Of `homogeneous` updates ACE refines nothing, of the others it does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels import KINDS, experts, timed
from covmerge import merge_layer

SHAPES = ((768, 768), (3072, 768), (768, 3072))
COUNT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for kind in arguments.kinds:
        for shape in SHAPES:
            updates = experts(kind, shape, COUNT)
            seconds = best(merges(updates, inputs(shape[1])), arguments.rounds)
            ace = seconds.pop("ace")
            told = (f"{name} {own:.3f} ({own / ace:.2f} of ace)" for name, own in seconds.items())
            print(f"{kind} {shape[0]} × {shape[1]}: ace {ace:.3f}, {', '.join(told)}", flush=True)


def merges(updates: list[Tensor], of_base: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What takes turns."""
    return {
        "ace": lambda: merge_layer(updates, "ace"),
        "auto": lambda: merge_layer(updates, "auto"),
        "auto, base's inputs": lambda: merge_layer(updates, "auto", base_inputs=of_base),
    }


def best(runs: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """The least CPU seconds of each."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            found[name] = min(found[name], timed(run)[1]["cpu_seconds"])
    return found


def inputs(d_in: int) -> Tensor:
    """E[z zᵀ] of drawn inputs a few directions of which outweigh the others."""
    draw = torch.Generator().manual_seed(1)
    z = torch.randn(2 * d_in, d_in, generator=draw) / (1.0 + torch.arange(d_in)).sqrt()
    turned = z @ torch.linalg.qr(torch.randn(d_in, d_in, generator=draw))[0]
    return turned.mT @ turned / len(turned)


if __name__ == "__main__":
    main()
