"""Do matrices of one shape gain by going through a method in one batch? On one core of a CPU, or a GPU.

    python -m benchmarks.batches [--device cuda] [--rounds 5] [--out FILE.json]

Random updates of four experts in float32, of norms a factor of 30 apart, so that ACE's gate fires. The loop
calls the method for one matrix after another, the batch (`Method.at_once`) for all of them; both in turns
in one process, and of each the least CPU seconds of the rounds, on a GPU seconds. `gain` is the loop's
seconds over the batch's: below 1 the batch lost. `off` is how far its results are from the loop's at most,
of their norm; `left` counts the matrices that it leaves to the kernel, whose seconds are in the batch's.

The closed form is left out where it comes to an eigenproblem of 3072 inputs: two matrices by `actmat` took
22 s by the loop and 29 s by the batch, once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.measure import clock, machine, usable
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.testing.groups import group_of, random_updates, relative
from covmerge.methods import Method, registry

RESULTS = Path(__file__).parent / "results"
EXPERTS, SPREAD = 4, 30.0
# (d_out, d_in), and how many of them are merged.
SHAPES = (((64, 64), 48), ((256, 256), 12), ((768, 768), 4), ((768, 3072), 2))
METHODS = ("ace", "actmat", "auto", "wudi", "iso_c")
CLOSED_FORM = ("actmat", "wudi")
LARGE = 1024  # inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = usable(arguments.device)
    out = arguments.out or RESULTS / (
        "batches.json" if device == "cpu" else f"batches-{device}.json"
    )
    torch.set_num_threads(1)
    rows = []
    for shape, members in SHAPES:
        updates = [
            [
                update.to(device)
                for update in random_updates(
                    *shape, EXPERTS, min(shape), SPREAD, seed, torch.float32
                )
            ]
            for seed in range(members)
        ]
        large = max(shape) > LARGE
        for name in METHODS:
            if large and name in CLOSED_FORM:
                continue
            method = registry.get(name)
            groups = [group_of(method, own) for own in updates]
            rounds = min(2, arguments.rounds) if large else arguments.rounds  # of seconds each
            row = {
                "shape": shape,
                "matrices": members,
                "method": name,
                **measured(method, groups, method.resolve({}), rounds, device),
            }
            rows.append(row)
            print(row, flush=True)
    result = {
        "command": "python -m benchmarks.batches"
        + ("" if device == "cpu" else f" --device {device}"),
        "machine": machine(device),
        "the batch gained": f"{sum(row['gain'] > 1.0 for row in rows)} of {len(rows)}",
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def measured(
    method: Method,
    groups: Sequence[LinearGroup],
    parameters: dict[str, object],
    rounds: int,
    device: str,
) -> dict[str, object]:
    """Seconds of the loop and of the batch, and how far apart their results are."""
    kind = "cpu_seconds" if device == "cpu" else "seconds"

    def seconds_of(run: Callable[[], object]) -> float:
        return cpu_seconds(run) if device == "cpu" else wall_seconds(run, device)

    def loop() -> list[Merged]:
        return [method(group, **parameters) for group in groups]

    def batch() -> list[Merged]:
        found = method.at_once(groups, **parameters)
        each = zip(found, groups, strict=True)
        return [method(group, **parameters) if own is None else own for own, group in each]

    pairs = zip(batch(), loop(), strict=True)  # what is loaded once, too
    off = max(relative(own.delta, other.delta.double()) for own, other in pairs)
    left = method.at_once(groups, **parameters).count(None)
    seconds: dict[str, list[float]] = {"loop": [], "batch": []}
    for _ in range(rounds):
        seconds["loop"].append(seconds_of(loop))
        seconds["batch"].append(seconds_of(batch))
    least = {name: min(own) for name, own in seconds.items()}
    return {
        kind: {name: float(f"{value:.3g}") for name, value in least.items()},
        "gain": round(least["loop"] / least["batch"], 2),
        "off": float(f"{off:.1e}"),
        "left": left,
    }


def cpu_seconds(run: Callable[[], object]) -> float:
    """Of the process: what others do on this machine is not in them."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


def wall_seconds(run: Callable[[], object], device: str) -> float:
    """Until a GPU has done what it was given."""
    begun = clock(device)
    run()
    return clock(device) - begun


if __name__ == "__main__":
    main()
