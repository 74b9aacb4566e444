"""Numbers: every method and step on layers of every size, dtype and kind, against its reference.

    python -m tests.campaigns.numbers --minutes 10 --seed 0

A layer (`layers.py`) is drawn by method, seed and number, so that it can be made again: `--method NAME
--first NUMBER --count 1`. What a merge may be off by is `agreement.py`. What fails is made smaller by
leaving choices out, and printed with the choices that remain. With failures the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tests.campaigns.agreement import OUTCOMES, Found, look
from tests.campaigns.layers import Layer, subjects

_SHRINKING = 10.0  # seconds


@dataclass
class Outcome:
    """What became of the layers of one method."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[tuple[Layer, Found]]] = field(default_factory=dict)


def smallest(layer: Layer, kind: str) -> Layer:
    """The layer without the choices that it fails in the same way without."""
    until = time.monotonic() + _SHRINKING
    before: Layer | None = None
    while before != layer:  # a choice may be needed only as long as another is there
        before = layer
        for choice in layer.choices:
            plainer = replace(layer, without=layer.without | {choice})
            if time.monotonic() < until and look(plainer).kind == kind:
                layer = plainer
    return layer


def run(
    names: Sequence[str], seed: int, *, first: int, count: int, seconds: float
) -> dict[str, Outcome]:
    """Merge layers in turns, one of each method, until the time ends; print what fails."""
    outcomes = {name: Outcome() for name in names}
    until = time.monotonic() + seconds
    for number in range(first, first + count):
        for name in names:
            if time.monotonic() > until:
                return outcomes
            own, layer = outcomes[name], Layer(name, seed, number)
            found = look(layer)
            own.counts[found.outcome] += 1
            if found.outcome == "failed":
                if found.kind not in own.failures:
                    _tell(layer, found)
                own.failures.setdefault(found.kind, []).append((layer, found))
    return outcomes


def _tell(layer: Layer, found: Found) -> None:
    small = smallest(layer, found.kind)
    kept = [choice for choice in small.choices if choice not in small.without]
    print(f"{layer.subject}: {found.kind}: input {layer.number}, {found.detail}")
    print(f"    with {', '.join(kept)} alone: {look(small).detail}", flush=True)
    dtype = str(small.dtype).removeprefix("torch.")
    norms = ", ".join(f"{float(own.double().norm()):.3g}" for own in small.updates)
    print(f"    {list(small.shape)} {dtype}, {small.parameters}, norms {norms}", flush=True)


def table(outcomes: dict[str, Outcome]) -> str:
    """Return what became of the layers as a table in Markdown."""
    lines = [f"| method | layers | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 2) + "|"]
    whole: Counter[str] = Counter()
    for name, own in outcomes.items():
        whole.update(own.counts)
        lines.append(_line(name, own.counts))
    return "\n".join([*lines, _line("all", whole)])


def _line(name: str, counts: Counter[str]) -> str:
    return f"| {name} | {counts.total()} | {' | '.join(str(counts[own]) for own in OUTCOMES)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", action="append", choices=subjects())
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    outcomes = run(
        asked.method or subjects(),
        asked.seed,
        first=asked.first,
        count=asked.count,
        seconds=60 * asked.minutes,
    )
    print(table(outcomes))
    return 1 if any(own.failures for own in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
