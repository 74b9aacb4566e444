"""When a merge from disk reads, computes and writes: do they overlap?

    python -m benchmarks.timeline [--layers 2] [--out FILE.json]

Three bfloat16 experts of a Llama-shaped base (`benchmarks.models`), by `average` and by
`ace`. `overlap` is the share of the shorter of two stages during which the other is at work too.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import covmerge
from benchmarks.measure import machine
from benchmarks.models import LLAMA, WORK, checkpoints
from covmerge.run.engine.executor import Span

RESULTS = Path(__file__).parent / "results"
Intervals = list[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "timeline.json")
    arguments = parser.parse_args()
    base, *experts = checkpoints(LLAMA, 3, layers=arguments.layers)
    merges = []
    for method in ("average", "ace"):
        out = WORK / "timeline"
        shutil.rmtree(out, ignore_errors=True)
        result = covmerge.merge(base, {path.name: path for path in experts}, method, out=out)
        shutil.rmtree(out)
        merges.append(described(method, arguments.layers, result.timeline))
    result = {"command": "python -m benchmarks.timeline", "machine": machine(), "merges": merges}
    arguments.out.write_text(json.dumps(result) + "\n")
    print(
        json.dumps([{k: v for k, v in merge.items() if k != "spans"} for merge in merges], indent=1)
    )


def described(method: str, layers: int, spans: Sequence[Span]) -> dict[str, object]:
    # Threads by number, in the order in which they come.
    threads = {ident: number for number, ident in enumerate(dict.fromkeys(s.thread for s in spans))}
    busy = {stage: union(spans, stage) for stage in ("read", "compute", "write")}
    seconds = {stage: sum(b - a for a, b in intervals) for stage, intervals in busy.items()}
    pairs = (("read", "compute"), ("write", "compute"), ("read", "write"))
    return {
        "title": f"{method}, {layers} layers of a Llama-shaped 1.1B model, three experts",
        "seconds": {stage: round(value, 2) for stage, value in seconds.items()},
        "overlap": {
            f"{one} and {other}": round(
                common(busy[one], busy[other]) / min(seconds[one], seconds[other]), 2
            )
            for one, other in pairs
        },
        "spans": [
            {
                "stage": span.stage,
                "thread": threads[span.thread],
                "start": round(span.start, 4),
                "stop": round(span.stop, 4),
            }
            for span in spans
        ],
    }


def union(spans: Sequence[Span], stage: str) -> Intervals:
    found: Intervals = []
    for span in sorted((s for s in spans if s.stage == stage), key=lambda s: s.start):
        if found and span.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.stop))
        else:
            found.append((span.start, span.stop))
    return found


def common(one: Intervals, other: Intervals) -> float:
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in other if c < b and a < d)


if __name__ == "__main__":
    main()
