"""The forecast of `covmerge plan --cluster` held against real merges: by one worker and two.

    python -m benchmarks.predicted [--methods average ties ace auto] [--layers 32] [--width 1024]
                                   [--disk 150e6] [--link 100e6] [--over fast slow link] [--out FILE]

On a machine that does nothing else, where it takes some minutes: from a fast disk, a slow one, and over a
link whose server grants each connection a quarter of it. The link brings the sources alone; the forecast
takes it for the network of the machine, on which the output is too. The rates that the forecast is given
are measured first, of one core. Start-up is one number of the forecast, and is held against that of a merge
of next to nothing, in a line of its own; the other lines are without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.measure import machine, spawn
from benchmarks.narrow import Rates, serving
from benchmarks.throttled import Disk
from covmerge.api import forecast_recipe
from covmerge.engine import Forecast, Hardware
from covmerge.recipe import parse_recipe

OUT = Path(__file__).parent / "results" / "predicted.json"
EXPERTS = ("a", "b", "c")
WAYS = ("fast", "slow", "link")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["average", "ties", "ace", "auto"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--disk", type=float, default=150e6, help="bytes a second of the slow one")
    parser.add_argument("--link", type=float, default=100e6, help="bytes a second of the link")
    parser.add_argument("--over", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    memory = Path("/dev/shm")  # a fast disk that is the same every time
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        rows = measured(Path(name), given)
    told = {name: value for name, value in vars(given).items() if name != "out"}
    given.out.write_text(json.dumps({"machine": machine(), **told, **rows}, indent=1) + "\n")


def measured(folder: Path, given: argparse.Namespace) -> dict[str, object]:
    """Merge by every method in every way, and predict the same."""
    sources, tiny = folder / "sources", folder / "tiny"
    save_sources(sources, given.layers, given.width)
    save_sources(tiny, 1, 16)
    rates = rates_of(sources / "base.safetensors")
    print("one core: " + ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items()))
    over: dict[str, dict[str, float]] = {
        "fast": {},
        "slow": {"disk": given.disk},
        "link": {"nic": given.link},
    }
    rows: list[dict[str, object]] = []
    started = 0.0
    print(
        f"{'':8} {'over':>6} {'workers':>7} {'predicted':>10} {'measured':>9} {'error':>6}  waits for"
    )
    link = Rates(latency=0.01, each=given.link / 4, total=given.link)
    with serving(folder, link) as server:

        def started_in(workers: int, places: str) -> float:
            return min(merged(f"{places}/tiny", "average", workers, folder, None) for _ in range(2))

        starts = {w: started_in(w, str(folder)) for w in (1, 2)}
        starts_over_link = {w: started_in(w, server.url) for w in (1, 2)}
        for method, way in product(given.methods, given.over):
            place = f"{server.url}/sources" if way == "link" else str(sources)
            seconds: list[float] = []
            for workers in (1, 2):
                found = predicted(place, method, workers, rates | over[way])
                own = merged(place, method, workers, folder, over[way].get("disk"))
                own -= (starts_over_link if way == "link" else starts)[workers]
                first, *stages = found.stages
                started = first.seconds
                ahead = sum(stage.seconds for stage in stages)
                bound = max(stages, key=lambda stage: stage.seconds).bound
                seconds.append(own)
                rows.append(
                    {
                        "method": method,
                        "disk": over[way].get("disk"),
                        "nic": over[way].get("nic"),
                        "workers": workers,
                        "predicted": ahead,
                        "measured": own,
                        "bound": bound,
                    }
                )
                print(
                    f"{method:8} {way:>6} {workers:7} {ahead:8.1f} s "
                    f"{own:7.1f} s {ahead / own - 1:+6.0%}  {bound}",
                    flush=True,
                )
            print(f"{'':23} two workers: {seconds[0] / seconds[1]:.2f} × as fast")
    print(f"start    {'':14} {started:8.1f} s {starts[1]:7.1f} s   (two workers {starts[2]:.1f} s)")
    return {
        "rates": rates,
        "start": {"predicted": started, "measured": starts, "over_link": starts_over_link},
        "rows": rows,
    }


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


def rates_of(file: Path) -> dict[str, float]:
    """What one core does a second, and what is read of the fast disk."""
    torch.set_num_threads(1)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    weights, base, total = (torch.randn(2**20) for _ in range(3))
    data = bytes(2**25)

    def read() -> None:
        with file.open("rb", buffering=0) as opened:
            opened.readinto(bytearray(file.stat().st_size))

    return {
        "flops": 2 * 1024**3 / best(lambda: a @ b),
        "stream": weights.nbytes / best(lambda: total.add_(weights - base, alpha=0.25)),
        "hash": len(data) / best(lambda: hashlib.sha256(data)),
        "disk": file.stat().st_size / best(read),
    }


def best(function: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    seconds: list[float] = []
    for _ in range(7):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def predicted(sources: str, method: str, workers: int, rates: dict[str, float]) -> Forecast:
    """The forecast for so many processes of this machine, each with a core."""
    experts = {name: f"{sources}/{name}.safetensors" for name in EXPERTS}
    base = f"{sources}/base.safetensors"
    recipe = parse_recipe({"base": base, "experts": experts, "method": method})
    hardware = Hardware(
        gpus=workers,  # as it calls devices, here a core for each process
        cores=os.cpu_count() or 1,
        disk=rates["disk"],
        nic=rates.get("nic"),
        flops=rates["flops"],
        stream=rates["stream"],
        hash=rates["hash"],
    )
    _, found = forecast_recipe(recipe, hardware)
    return found


def merged(sources: str, method: str, workers: int, folder: Path, disk: float | None) -> float:
    """Seconds of a merge by so many processes, from its start to its end."""
    experts = [f"--expert={name}={sources}/{name}.safetensors" for name in EXPERTS]
    out, environment = folder / "out", {**os.environ, "OMP_NUM_THREADS": "1"}
    if disk is not None:
        Disk.make(folder / "disk")
        environment["THROTTLE"] = f"{disk}:{folder / 'disk'}"
    command: Sequence[str] = [
        *(sys.executable, "-m", "benchmarks.throttled", "merge"),
        *("--base", f"{sources}/base.safetensors", *experts, f"--method={method}"),
        *("--threads=1", f"--workers={workers}", str(out)),
    ]
    found = spawn(command, env=environment, log=folder / "log")
    shutil.rmtree(out)
    return found["seconds"]


if __name__ == "__main__":
    main()
