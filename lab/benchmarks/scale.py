"""The same merges by threads, processes, ranks and Ray: bytes, CPU seconds, and what an item costs more.

    python -m benchmarks.scale [--layers 12] [--width 512] [--methods average,ties,ace] [--items 1000]

CPU seconds are of all processes of a merge, those of Ray's nodes aside, which no merge starts. Wall
seconds say something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.measure import machine  # what the figures were taken on
from benchmarks.nodes import nodes_of_ray

OUT = Path(__file__).parent / "results" / "scale.json"


def save_sources(folder: Path, layers: int, width: int) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    base = {
        f"layers.{n}.mlp.up_proj.weight": torch.randn(width, width, generator=generator)
        for n in range(layers)
    }
    save_file(base, folder / "base.safetensors")
    flags = ["--base", str(folder / "base.safetensors")]
    for name in ("a", "b", "c"):
        expert = {n: w + 0.01 * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        save_file(expert, folder / f"{name}.safetensors")
        flags += ["--expert", f"{name}={folder / name}.safetensors"]
    return flags


def merged(flags: list[str], out: Path, ranks: int, **variables: str) -> dict[str, Any]:
    """Merge by as many processes as there are ranks; hash, CPU and wall seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "covmerge", "merge", *flags, str(out)]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **variables, "RANK": str(number), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.DEVNULL,
        )
        for number in range(ranks)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"failed: {' '.join(command)}")
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    digest = hashlib.sha256()
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    return {
        "hash": digest.hexdigest()[:16],
        "cpu_seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        "wall_seconds": wall,
    }


def item_cost(folder: Path, items: int, flags: list[str], ranks: int) -> dict[str, float]:
    """Seconds that one more tiny item takes: what starts and ends a merge is in both sizes."""
    found = []
    for layers in (100, 100 + items):
        own = folder / f"tiny-{layers}"
        own.mkdir(exist_ok=True)
        sources = save_sources(own, layers, 16)
        with tempfile.TemporaryDirectory(dir=folder) as out:
            command = [*sources, "--method=average", "--threads=1", *flags]
            found.append(merged(command, Path(out) / "out", ranks))
    few, many = found
    return {key: (many[key] - few[key]) / items for key in ("cpu_seconds", "wall_seconds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--methods", default="average,ties,ace")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--no-ray", action="store_true")
    given = parser.parse_args()
    ways: dict[str, tuple[list[str], int]] = {
        "threads": ([], 1),
        "2 processes": (["--workers=2"], 1),
        **{f"{n} ranks": (["--executor=ranks"], n) for n in (1, 2, 3, 5)},
    }
    with ExitStack() as stack:
        if not given.no_ray:
            address = stack.enter_context(nodes_of_ray(2))
            ways["2 nodes of Ray"] = (["--executor=ray", f"--address={address}"], 1)
        measure(ways, given)


def measure(ways: dict[str, tuple[list[str], int]], given: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = save_sources(folder, given.layers, given.width)
        for method in given.methods.split(","):
            for way, (flags, ranks) in ways.items():
                out = folder / f"{method}-{way}".replace(" ", "-")
                flags = [*sources, "--method", method, "--threads=1", *flags]
                row = {"method": method, "way": way, **merged(flags, out, ranks)}
                rows.append(row)
                first = next(r for r in rows if r["method"] == method)
                print(
                    f"{method:10}{way:16}{row['hash']}{row['cpu_seconds']:8.1f} s of CPU"
                    f"{row['wall_seconds']:8.1f} s"
                    f"{'' if row['hash'] == first['hash'] else '  DIFFERS'}"
                )
        costs = {way: item_cost(folder, given.items, *ways[way]) for way in ways}
        for way, cost in costs.items():
            print(
                f"{way:16}{1000 * cost['cpu_seconds']:8.2f} ms of CPU and "
                f"{1000 * cost['wall_seconds']:8.2f} ms an item that is next to nothing"
            )
    record = {"machine": machine(), "layers": given.layers, "width": given.width, "rows": rows}
    record["item_seconds"] = costs
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
