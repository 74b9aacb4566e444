"""A merge of files on a GPU beside the same on the CPU, and what each part of the way to the GPU brings.

    python -m benchmarks.devices [--layers 6] [--width 1024] [--methods NAMES] [--rounds 2] [--out FILE]

Four experts of the six matrices of a transformer's blocks, in bfloat16, in memory; all cores. Seconds of a
merge in a process that has imported everything, from its call to its verified output, ways in turn:

cpu             as without `--device`
gpu             `--device cuda`
copied plainly  nothing is sent while another item is computed
two processes   `--workers 2` share the GPU, their start included

The first and the last are done once, as each takes long.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

import covmerge
from benchmarks.measure import clock, machine, spread, usable
from covmerge.run.engine import options

RESULTS = Path(__file__).parent / "results"
METHODS = "average,ties,ace,auto,tsv_m,iso_c,actmat"
EXPERTS = 4
WAYS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {},
    "gpu": {"device": "cuda"},
    "copied plainly": {"device": "cuda"},
    "two processes": {"device": "cuda", "workers": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "devices.json")
    given = parser.parse_args()
    usable("cuda")
    rows: list[dict[str, object]] = []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        base, experts = saved(Path(name), given.layers, given.width)
        for method in given.methods.split(","):
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(given.rounds):
                for way in WAYS if number == 0 else list(WAYS)[1:-1]:
                    runs[way].append(timed(way, base, experts, method, Path(name) / "out"))
            for way, own in runs.items():
                took = spread(own)
                rows.append({"method": method, "way": way, **took})
                peak = took["peak_bytes"]["max"] / 2**30 if "peak_bytes" in took else 0.0
                print(
                    f"{method:10}{way:16}{took['seconds']['min']:8.2f} s  {peak:.2f} GiB",
                    flush=True,
                )
            record = {"machine": machine("cuda"), "layers": given.layers, "width": given.width}
            record |= {"rounds": given.rounds, "rows": rows}
            given.out.write_text(json.dumps(record, indent=1) + "\n")


def saved(folder: Path, layers: int, width: int) -> tuple[Path, dict[str, Path]]:
    """A base and its experts, whose updates differ in norm by 30."""
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, Sequence[int]] = {}
    for layer in range(layers):
        for part in ("q", "k", "v", "o"):
            shapes[f"layers.{layer}.attn.{part}.weight"] = (width, width)
        shapes[f"layers.{layer}.mlp.up.weight"] = (4 * width, width)
        shapes[f"layers.{layer}.mlp.down.weight"] = (width, 4 * width)
    base = {name: 0.02 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    paths = {f"e{t}": folder / f"e{t}.safetensors" for t in range(EXPERTS)}
    for t, path in enumerate(paths.values()):
        size = 1e-3 * 30 ** (t / (EXPERTS - 1))
        moved = {n: w + size * torch.randn(w.shape, generator=draw) for n, w in base.items()}
        save_file({n: w.bfloat16() for n, w in moved.items()}, path)
    save_file({n: w.bfloat16() for n, w in base.items()}, folder / "base.safetensors")
    return folder / "base.safetensors", paths


def timed(
    way: str, base: Path, experts: Mapping[str, Path], method: str, out: Path
) -> dict[str, float]:
    """One merge; on a GPU also what torch held there at most, of one process."""
    on_gpu = "device" in WAYS[way] and "workers" not in WAYS[way]
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with without(way):
        begun = clock("cuda")
        covmerge.merge(base, experts, method, out, **WAYS[way])
        found = {"seconds": clock("cuda") - begun}
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    shutil.rmtree(out)
    return found


@contextmanager
def without(way: str) -> Generator[None]:
    """Leave out what a way does without."""
    with ExitStack() as stack:
        if way == "copied plainly":
            stack.enter_context(patch.object(options, "pinned_bytes", lambda device: 0))
        yield


if __name__ == "__main__":
    main()
