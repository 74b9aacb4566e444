"""How much faster two are than one, and what Ray takes to start.

    python -m benchmarks.speed [--layers 48] [--width 1024] [--methods average,ties,ace,auto] [--rounds 3]

On a machine of two cores that does nothing else. All ways in turn, round by round, each with one thread a
process; the files lie in memory, where that is a folder. Seconds are of a merge from its start to its end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import machine, spread
from benchmarks.nodes import nodes_of_ray
from benchmarks.scale import merged, save_sources

OUT = Path(__file__).parent / "results" / "speed.json"

# In a process of its own, as a merge is.
_FIRST_TASK = """
import json, sys, time
begun = time.perf_counter()
from covmerge.run.engine.cluster.connection import connect
import ray
imported = time.perf_counter()
connect(sys.argv[1])
connected = time.perf_counter()
nothing = ray.remote(lambda: None)
ray.get(nothing.remote())
first = time.perf_counter()
for _ in range(20):
    ray.get(nothing.remote())
ended = time.perf_counter()
times = {"import": imported - begun, "connect": connected - imported, "first task": first - connected}
print(json.dumps({**times, "a task more": (ended - first) / 20}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--methods", default="average,ties,ace,auto")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    begun = time.perf_counter()
    with nodes_of_ray(2) as address:
        started = time.perf_counter() - begun
        tasks = spread([first_task(address) for _ in range(given.rounds)])
        print(f"a cluster of two nodes is there after {started:.1f} s")
        for what, own in tasks.items():
            print(f"{what:12}{own['median']:8.3f} s")
        found = speeds(address, given)
    record = {"machine": machine(), **vars(given), "cluster": {"seconds": started, **tasks}}
    OUT.write_text(json.dumps({**record, "rows": found}, indent=1) + "\n")


def first_task(address: str) -> dict[str, float]:
    """Seconds until a process has joined a cluster and had something done."""
    command = [sys.executable, "-c", _FIRST_TASK, address]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def speeds(address: str, given: argparse.Namespace) -> list[dict[str, object]]:
    """Merge by every method in every way."""
    ways: dict[str, tuple[Sequence[str], int]] = {
        "1 process": (["--workers=1"], 1),
        "2 processes": (["--workers=2"], 1),
        "2 ranks": (["--executor=ranks"], 2),
        "2 nodes of Ray": (["--executor=ray", f"--address={address}"], 1),
    }
    rows: list[dict[str, object]] = []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        sources = save_sources(folder, given.layers, given.width)
        for method in given.methods.split(","):
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            hashes: set[object] = set()
            for _ in range(given.rounds):
                for way, (flags, ranks) in ways.items():
                    command = [*sources, "--method", method, "--threads=1", *flags]
                    run = merged(command, f"{folder}/out", ranks)
                    shutil.rmtree(folder / "out")
                    hashes.add((run.pop("hash"), run.pop("weights")))
                    runs[way].append(run)
            if len(hashes) != 1:
                raise SystemExit(f"{method}: the bytes differ")
            found = {way: spread(own) for way, own in runs.items()}
            alone = found["1 process"]["wall_seconds"]["median"]
            for way, own in found.items():
                wall = own["wall_seconds"]
                rows.append({"method": method, "way": way, **own})
                print(
                    f"{method:10}{way:16}{wall['median']:7.1f} s ({wall['min']:.1f} to {wall['max']:.1f})"
                    f"{alone / wall['median']:6.2f} × as fast",
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    main()
