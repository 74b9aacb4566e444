"""The forecast of `covmerge plan --cluster` held against merges by one process, two, and two nodes of Ray.

    python -m benchmarks.predicted [--methods average ties ace auto] [--layers 32] [--width 1024]
                                   [--disk 150e6] [--link 100e6] [--over fast slow link]
                                   [--no-ray] [--out FILE]
    python -m benchmarks.predicted --again FILE [--out FILE]

On a machine that does nothing else, where it takes some minutes: from a fast disk, a slow one, and over a
link whose server grants each connection a quarter of it. The link brings the sources alone; the forecast
takes it for the network of the machine, on which the output is too. The rates that the forecast is given
are measured first, of one core. Start-up is one number of the forecast, and is held against that of a merge
of next to nothing, in a line of its own; the other lines are without it.

`--again` measures nothing: the cases, rates and times are an earlier result's, and the predictions those of
the forecast as it is now. What was not measured then is what the forecast takes of a CPU (`assumed`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.measure import machine, spawn
from benchmarks.narrow import Rates, serving
from benchmarks.nodes import nodes_of_ray
from benchmarks.throttled import Disk
from covmerge.front.api import forecast_recipe
from covmerge.maths.linalg.auto import eigh_cost
from covmerge.maths.linalg.lapack import eigh
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine import Forecast, Hardware

OUT = Path(__file__).parent / "results" / "predicted.json"
EXPERTS = ("a", "b", "c")
OVER = ("fast", "slow", "link")
PROCESSES = {"1 process": 1, "2 processes": 2}
RAY = "2 nodes of Ray"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["average", "ties", "ace", "auto"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--disk", type=float, default=150e6, help="bytes a second of the slow one")
    parser.add_argument("--link", type=float, default=100e6, help="bytes a second of the link")
    parser.add_argument("--over", nargs="+", choices=OVER, default=list(OVER))
    parser.add_argument("--no-ray", action="store_true", help="leave out the nodes of Ray")
    parser.add_argument("--again", type=Path, help="take cases and times of this result")
    parser.add_argument("--out", type=Path, default=OUT)
    given = vars(parser.parse_args())
    out, again = given.pop("out"), given.pop("again")
    found: dict[str, Any]
    if again is None:
        found = {"commands": [], "machine": machine(), **given}
    else:
        found = json.loads(again.read_bytes())
    found["commands"].append(shlex.join(["python", "-m", "benchmarks.predicted", *sys.argv[1:]]))
    memory = Path("/dev/shm")  # a fast disk that is the same every time
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        save_sources(folder / "sources", found["layers"], found["width"])
        link = Rates(latency=0.01, each=found["link"] / 4, total=found["link"])
        with serving(folder, link) as server:
            places = {place: server.url if place == "link" else name for place in OVER}
            if again is None:
                found |= measured(folder, places, found)
            found |= beside(places, found)
    out.write_text(json.dumps(found, indent=1) + "\n")


def measured(folder: Path, places: Mapping[str, str], cases: Mapping[str, Any]) -> dict[str, Any]:
    """What one core does, and seconds of every method in every way."""
    save_sources(folder / "tiny", 1, 16)
    rates = rates_of(folder / "sources" / "base.safetensors")
    with ExitStack() as stack:
        ways = {name: [f"--workers={count}"] for name, count in PROCESSES.items()}
        if not cases["no_ray"]:
            address = stack.enter_context(nodes_of_ray(2))
            ways[RAY] = ["--executor", "ray", f"--address={address}"]
        starts = {
            f"{name}, {place}": min(
                merged(f"{places[place]}/tiny", "average", flags, folder, None) for _ in range(2)
            )
            for place, (name, flags) in product(("fast", "link"), ways.items())
        }
        rows: list[dict[str, Any]] = []
        for method, place, name in product(cases["methods"], cases["over"], ways):
            disk = cases["disk"] if place == "slow" else None
            seconds = merged(f"{places[place]}/sources", method, ways[name], folder, disk)
            seconds -= starts[f"{name}, {'link' if place == 'link' else 'fast'}"]
            rows.append({"method": method, "over": place, "by": name, "measured": seconds})
            print(f"{method} {place} {name}: {seconds:.1f} s", flush=True)
    return {"rates": rates, "start": {"measured": starts}, "rows": rows}


def beside(places: Mapping[str, str], found: Mapping[str, Any]) -> dict[str, Any]:
    """The forecast of what was measured, beside it."""
    core = Hardware(cores=1, flops=found["rates"]["flops"])
    assumed = {} if "eigen" in found["rates"] else {"eigen": core.device_eigen}
    rates = found["rates"] | assumed
    print("one core: " + ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items()))
    over = {"fast": {}, "slow": {"disk": found["disk"]}, "link": {"nic": found["link"]}}
    print(
        f"{'':8} {'over':>6} {'by':>14} {'predicted':>10} {'measured':>9} {'error':>6}  waits for"
    )
    rows: list[dict[str, Any]] = []
    alone, started = 0.0, 0.0
    for row in found["rows"]:
        method, place, name, own = (row[key] for key in ("method", "over", "by", "measured"))
        if name in PROCESSES:
            # As the forecast calls devices, here a core for each process.
            machines = {"gpus": PROCESSES[name], "cores": found["machine"]["cores"]}
        else:
            machines = {"nodes": 2, "cores": 1}
        start, *stages = predicted(
            f"{places[place]}/sources", method, machines, rates | over[place]
        ).stages
        started = start.seconds
        ahead = sum(stage.seconds for stage in stages)
        bound = max(stages, key=lambda stage: stage.seconds).bound
        rows.append({**row, "predicted": ahead, "bound": bound})
        alone = own if name == "1 process" else alone
        print(
            f"{method:8} {place:>6} {name:>14} {ahead:8.1f} s {own:7.1f} s "
            f"{ahead / own - 1:+6.0%}  {bound}, {alone / own:.2f} × as fast as one"
        )
    starts = found["start"]["measured"]
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in starts.items())
    print(f"start: predicted {started:.1f} s; {told}")
    return {"assumed": assumed, "start": {"predicted": started, "measured": starts}, "rows": rows}


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
    gram = (a @ a.mT).double()

    def read() -> None:
        with file.open("rb", buffering=0) as opened:
            opened.readinto(bytearray(file.stat().st_size))

    return {
        "flops": 2 * 1024**3 / best(lambda: a @ b),
        "eigen": eigh_cost(1024).flops / best(lambda: eigh(gram)),
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


def predicted(
    sources: str, method: str, machines: Mapping[str, int], rates: Mapping[str, float]
) -> Forecast:
    """The forecast for this machine, with a core for each process, and one disk and link for all."""
    experts = {name: f"{sources}/{name}.safetensors" for name in EXPERTS}
    base = f"{sources}/base.safetensors"
    recipe = parse_recipe({"base": base, "experts": experts, "method": method})
    all_get = min(rates["disk"], rates.get("nic", inf))
    hardware = Hardware(**machines, **rates, storage=all_get)  # pyright: ignore[reportArgumentType]
    _, found = forecast_recipe(recipe, hardware)
    return found


def merged(
    sources: str, method: str, flags: Sequence[str], folder: Path, disk: float | None
) -> float:
    """Seconds of a merge, from its start to its end."""
    experts = [f"--expert={name}={sources}/{name}.safetensors" for name in EXPERTS]
    out, environment = folder / "out", {**os.environ, "OMP_NUM_THREADS": "1"}
    if disk is not None:
        Disk.make(folder / "disk")
        environment["THROTTLE"] = f"{disk}:{folder / 'disk'}"
    command: Sequence[str] = [
        *(sys.executable, "-m", "benchmarks.throttled", "merge"),
        *("--base", f"{sources}/base.safetensors", *experts, f"--method={method}"),
        *("--threads=1", *flags, str(out)),
    ]
    found = spawn(command, env=environment, log=folder / "log")
    shutil.rmtree(out)
    return found["seconds"]


if __name__ == "__main__":
    main()
