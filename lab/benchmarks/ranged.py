"""Merges of sources behind a narrow link: by ranges, beside downloading all files first and merging then.

    python -m benchmarks.ranged [--layers 4] [--width 2048] [--latency 0.03]
                                [--each 10e6] [--total 100e6]

On a machine that does nothing else, where it takes two minutes. In `part` a quarter of the layers is
merged, and the others are the base's. Seconds of a download are of covmerge's own requests, without a
start.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.measure import machine, spawn
from benchmarks.narrow import Narrow, Rates, serving

OUT = Path(__file__).parent / "results" / "ranged.json"
EXPERTS = ("a", "b", "c")
FILES = tuple(f"{name}.safetensors" for name in ("base", *EXPERTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--latency", type=float, default=Rates.latency, help="seconds")
    parser.add_argument("--each", type=float, default=Rates.each, help="bytes/s of a connection")
    parser.add_argument("--total", type=float, default=Rates.total, help="bytes/s of all")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    memory = Path("/dev/shm")  # a disk that holds nothing up
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        rows = measured(Path(name), given)
    told = {"machine": machine(), "load": load, **vars(given), "rows": rows}
    OUT.write_text(json.dumps(told, indent=1) + "\n")


def save_sources(folder: Path, layers: int, width: int) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    base = {
        f"layers.{n}.mlp.up_proj.weight": torch.randn(width, width, generator=generator)
        for n in range(layers)
    }
    save_file(base, folder / "base.safetensors")
    for name in EXPERTS:
        expert = {n: w + 0.01 * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        save_file(expert, folder / f"{name}.safetensors")


def measured(folder: Path, given: argparse.Namespace) -> list[dict[str, object]]:
    """Merge in every way, to the same bytes."""
    sources = folder / "sources"
    save_sources(sources, given.layers, given.width)
    size = sum((sources / file).stat().st_size for file in FILES)
    others = range(-(-given.layers // 4), given.layers)
    rows: list[dict[str, object]] = []
    print(
        f"{'':8} {'':14} {'of the sources':>14} {'requests':>9} {'seconds':>8} {'of downloading':>14}"
    )
    with serving(sources, Rates(given.latency, given.each, given.total)) as server:
        for name, method, rules in (
            ("average", "average", []),
            ("ties", "ties", []),
            ("part", "average", [{"match": f"layers.{n}.*", "use": "base"} for n in others]),
        ):
            found = ways(server, folder, method, rules)
            whole = found["download first"]["seconds"]
            for way, row in found.items():
                row = {
                    "of_sources": row["bytes"] / size,
                    "of_download": row["seconds"] / whole,
                    **row,
                }
                rows.append({"merge": name, "way": way, **row})
                print(
                    f"{name:8} {way:14} {row['of_sources']:13.2f}x {row['requests']:9.0f} "
                    f"{row['seconds']:8.1f} {row['of_download']:13.2f}x",
                    flush=True,
                )
    return rows


def ways(
    server: Narrow, folder: Path, method: str, rules: Sequence[Mapping[str, str]]
) -> dict[str, dict[str, float]]:
    """One merge in two ways: seconds, and what came over the link."""
    found: dict[str, dict[str, float]] = {}
    digests: set[str] = set()
    local = folder / "downloaded"
    local.mkdir()
    server.clear()
    log = folder / "log"
    addresses = [f"{server.url}/{file}" for file in FILES]
    spawn([sys.executable, "-m", "benchmarks.narrow", str(local), *addresses], log=log)
    download = float(log.read_text())
    counted = server.counted()
    seconds, digest = merged(str(local), folder, method, rules)
    found["download first"] = {"seconds": download + seconds, "download": download, **counted}
    digests.add(digest)
    shutil.rmtree(local)
    server.clear()
    seconds, digest = merged(server.url, folder, method, rules)
    found["ranges"] = {"seconds": seconds, **server.counted()}
    digests.add(digest)
    if len(digests) > 1:
        raise SystemExit(f"{method}: the ways gave different bytes")
    return found


def merged(
    sources: str,
    folder: Path,
    method: str,
    rules: Sequence[Mapping[str, str]],
) -> tuple[float, str]:
    """Seconds of a merge of sources below a folder or an address, from its start; the weights' hash."""
    base, *experts = (f"{sources}/{file}" for file in FILES)
    recipe, out = folder / "recipe.json", folder / "out"
    told = {"base": base, "experts": dict(zip(EXPERTS, experts, strict=True)), "method": method}
    recipe.write_text(json.dumps({**told, "rules": rules} if rules else told))
    command = [sys.executable, "-m", "covmerge", "merge", str(recipe), str(out), "--threads=1"]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    seconds = spawn(command, env=own, log=folder / "log")["seconds"]
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    shutil.rmtree(out)
    return seconds, digest


if __name__ == "__main__":
    main()
