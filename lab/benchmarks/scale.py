"""The same merges by threads, processes, ranks and Ray: bytes, CPU seconds, and what an item costs more.

Threads and Ray also merge from a bucket into one, of a server of S3 on this machine. Such an output says
elsewhere where its sources lie, so there is a hash of the weights alone too.

    python -m benchmarks.scale [--layers 12] [--width 512] [--methods average,ties,ace,auto] [--items 1000]

CPU seconds are of all processes of a merge, those of Ray's nodes aside, which no merge starts. Wall
seconds say something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch
from safetensors.torch import save_file

from benchmarks.measure import machine  # what the figures were taken on
from benchmarks.nodes import nodes_of_ray

OUT = Path(__file__).parent / "results" / "scale.json"
BUCKET = "s3://scale"


@dataclass(frozen=True)
class Way:
    """How a merge is done.

    Attributes:
        flags: that say so.
        ranks: as many processes are started.
        far: its sources and its output lie in a bucket.
    """

    flags: list[str]
    ranks: int = 1
    far: bool = False


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


@contextmanager
def bucket(cache: Path) -> Iterator[None]:
    """Serve S3, and let all that is started know where; where outputs for it are made, too."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "scale",
        "AWS_SECRET_ACCESS_KEY": "scale",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "COVMERGE_CACHE": str(cache),
    }
    fsspec.filesystem("s3").mkdir(BUCKET)
    try:
        yield
    finally:
        server.stop()


def digest(out: str, *, weights: bool = False) -> str:
    """The hash of all files of an output, here or in a bucket, or of its weights."""
    system, root = fsspec.core.url_to_fs(out, use_listings_cache=False)
    found = hashlib.sha256()
    for path in sorted(system.find(root)):
        if path.endswith(".safetensors") or not weights:
            found.update(system.cat_file(path))
    return found.hexdigest()[:16]


def merged(flags: list[str], out: str, ranks: int) -> dict[str, Any]:
    """Merge by as many processes as there are ranks; hashes, CPU and wall seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "covmerge", "merge", *flags, out]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(number), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.DEVNULL,
        )
        for number in range(ranks)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"failed: {' '.join(command)}")
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "hash": digest(out),
        "weights": digest(out, weights=True),
        "cpu_seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        "wall_seconds": wall,
    }


def item_cost(folder: Path, items: int, way: Way) -> dict[str, float]:
    """Seconds that one more tiny item takes: what starts and ends a merge is in both sizes."""
    found = []
    for layers in (100, 100 + items):
        own = folder / f"tiny-{layers}"
        own.mkdir(exist_ok=True)
        sources = save_sources(own, layers, 16)
        with tempfile.TemporaryDirectory(dir=folder) as out:
            command = [*sources, "--method=average", "--threads=1", *way.flags]
            found.append(merged(command, f"{out}/out", way.ranks))
    few, many = found
    return {key: (many[key] - few[key]) / items for key in ("cpu_seconds", "wall_seconds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--methods", default="average,ties,ace,auto")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    ways = {
        "threads": Way([]),
        "2 processes": Way(["--workers=2"]),
        **{f"{n} ranks": Way(["--executor=ranks"], n) for n in (1, 2, 3, 5)},
        "s3 to s3": Way([], far=True),
    }
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(bucket(folder / "cache"))
        if not given.no_ray:
            by_ray = ["--executor=ray", f"--address={stack.enter_context(nodes_of_ray(2))}"]
            ways |= {
                "2 nodes of Ray": Way(by_ray),
                "s3 to s3 by Ray": Way(by_ray, far=True),
            }
        near = save_sources(folder, given.layers, given.width)
        fsspec.filesystem("s3").put(f"{folder}/*.safetensors", f"{BUCKET}/")
        far = [flag.replace(str(folder), BUCKET) for flag in near]
        for method in given.methods.split(","):
            for way, how in ways.items():
                place, sources = (BUCKET, far) if how.far else (folder, near)
                out = f"{place}/{method}-{way}".replace(" ", "-")
                flags = [*sources, "--method", method, "--threads=1", *how.flags]
                row = {"method": method, "way": way, **merged(flags, out, how.ranks)}
                rows.append(row)
                first = next(r for r in rows if r["method"] == method)
                same = "weights" if how.far else "hash"
                print(
                    f"{method:10}{way:16}{row['hash']} {row['weights']}{row['cpu_seconds']:8.1f} s of CPU"
                    f"{row['wall_seconds']:8.1f} s{'' if row[same] == first[same] else '  DIFFERS'}"
                )
        costs = {
            way: item_cost(folder, given.items, how) for way, how in ways.items() if not how.far
        }
        for way, cost in costs.items():
            print(
                f"{way:16}{1000 * cost['cpu_seconds']:8.2f} ms of CPU and "
                f"{1000 * cost['wall_seconds']:8.2f} ms an item that is next to nothing"
            )
    record = {"machine": machine(), "layers": given.layers, "width": given.width, "rows": rows}
    record["item_seconds"] = costs
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
