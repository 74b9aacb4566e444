"""How fast this machine is, measured in a moment."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from covmerge.engine import torch_threads, usable_device
from covmerge.plan import Plan
from covmerge.recipe import Recipe

_GEMM_SIDE = 768
_GEMM_SECONDS = 0.1
_READ_BYTES = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Speed:
    """Rates of this machine.

    Attributes:
        flops: floating-point operations a second, in matrix products of the compute dtype.
        read: bytes a second from one source file; None where no source is a local file.
        read_from: that file.
    """

    flops: float
    read: float | None
    read_from: Path | None

    def seconds(self, plan: Plan) -> float:
        """Estimate the run: reading and writing overlap computing, and share the disk.

        Rough: the refinement of ACE is counted even where no gate will fire, elementwise methods are
        bound by memory rather than products, and a file read a moment ago comes from memory.
        """
        moved = 0.0 if self.read is None else (plan.read_bytes + plan.write_bytes) / self.read
        return max(plan.flops / self.flops, moved)


def measure_speed(recipe: Recipe, dtype: torch.dtype, device: str, threads: int | None) -> Speed:
    """Measure for about a tenth of a second.

    Raises:
        InputError: the device cannot be used.
    """
    target = usable_device(device)
    with torch_threads(threads):
        flops = _product_rate(dtype, target)
    experts = [expert.source for expert in recipe.experts.values()]
    sources = experts if recipe.base is None else [recipe.base, *experts]
    file = next(_weight_files(sources), None)
    return Speed(flops, None if file is None else _read_rate(file), file)


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    side = torch.ones(_GEMM_SIDE, _GEMM_SIDE, dtype=dtype, device=device)
    (side @ side)[0, 0].item()  # the first product pays for starting the threads
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < _GEMM_SECONDS:
        (side @ side)[0, 0].item()  # reading one number waits for the device
        count += 1
    return count * 2.0 * _GEMM_SIDE**3 / elapsed


def _weight_files(sources: Iterable[str]) -> Iterator[Path]:
    """The largest file of weights of each source that is a local path."""
    for source in sources:
        path = Path(source).expanduser()
        files = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
        weights = [file for file in files if file.suffix in _WEIGHTS and file.is_file()]
        if weights:
            yield max(weights, key=lambda file: file.stat().st_size)


def _read_rate(path: Path) -> float | None:
    buffer = bytearray(_CHUNK_BYTES)
    total, start = 0, time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while total < _READ_BYTES and (count := file.readinto(buffer)):
            total += count
    return total / (time.perf_counter() - start) if total else None
