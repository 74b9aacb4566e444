"""What a report takes beside its merge, in CPU seconds of whole commands, on one core.

    python -m benchmarks.reports [--rounds 3] [--out FILE.json]

Three bfloat16 experts of a Llama-shaped base of 14M parameters (`benchmarks.models`), by `ace`: merged,
merged with `--report`, and reported on afterwards; each the least of the rounds, which take turns. Of a
report also the parts: the second pass over base, experts and output, its singular values, and the page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.measure import machine, spawn
from benchmarks.models import LLAMA, WORK, apart, checkpoints
from covmerge.front.reporting.html import render
from covmerge.front.reporting.job import ReportJob
from covmerge.run.verification import Verification

RESULTS = Path(__file__).parent / "results"
OUT = WORK / "reported"
# 14.2M parameters; its layers are a number that no other benchmark has, as folders are named by it.
SMALL = {
    **LLAMA,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 7,
    "vocab_size": 4096,
}

_T = TypeVar("_T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "reports.json")
    arguments = parser.parse_args()
    paths = checkpoints(SMALL, 3)
    merge = ["merge", "--base", str(paths[0]), "--method", "ace", str(OUT), "--overwrite"]
    merge += [f"--expert={path.name}={path}" for path in paths[1:]]
    commands = {
        "merge": merge,
        "merge --report": [*merge, "--report"],
        "report OUT": ["report", str(OUT), "--overwrite"],
        "report OUT --spectra all": ["report", str(OUT), "--overwrite", "--spectra", "all"],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    rounds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(arguments.rounds):
        for name, command in commands.items():
            argv = [sys.executable, "-m", "covmerge", *command]
            rounds[name].append(spawn(argv, env=environment)["cpu_seconds"])
    least = {name: min(seconds) for name, seconds in rounds.items()}
    result = {
        "command": "python -m benchmarks.reports",
        "machine": machine(),
        "cpu_seconds": least,
        "over the merge's": {n: round(s / least["merge"], 2) for n, s in least.items()},
        "parts of a report": apart(_parts, OUT),
    }
    shutil.rmtree(OUT)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _parts(out: Path) -> dict[str, float]:
    """CPU seconds of the parts of one report."""
    torch.set_num_threads(1)
    verified = Verification(out, ())
    _timed(ReportJob(out, "none", verification=verified).run)  # what is imported on the way
    plain, _ = _timed(ReportJob(out, "none", verification=verified).run)
    some, report = _timed(ReportJob(out, "some", verification=verified, share=0.2).run)
    page, _ = _timed(lambda: render(report))
    return {
        "second pass": round(plain, 2),
        "singular values of some": round(some - plain, 2),
        "page": round(page, 2),
    }


def _timed(work: Callable[[], _T]) -> tuple[float, _T]:
    started = time.process_time()
    found = work()
    return time.process_time() - started, found


if __name__ == "__main__":
    main()
