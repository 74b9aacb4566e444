"""How fast this machine is, measured in about a second: products, eigenproblems and reading apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from covmerge.maths.linalg.auto import eigh_cost
from covmerge.maths.linalg.lapack import eigh
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import Recipe
from covmerge.run.engine.devices import usable_device
from covmerge.run.engine.thread_count import torch_threads

# As large as layers are: smaller ones are slower, and larger ones as fast.
_PRODUCT_SIDE, _EIGEN_SIDE = 1536, 768
_SECONDS = 0.4  # for each of both, and no less than so often:
_TIMES = 3
_BUSY = 0.8  # of the processors' time: who gets less shares them
_READ_BYTES = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Speed:
    """Rates of this machine.

    Attributes:
        flops: floating-point operations a second, in matrix products of the compute dtype.
        eigen: the same in eigenproblems, as plans count them.
        share: of the time of the processors that were asked for, what this process got while it measured;
            of another device 1.
        read: bytes a second from one source file; None where no source is a local file.
        read_from: that file.
    """

    flops: float
    eigen: float
    share: float
    read: float | None
    read_from: Path | None

    def seconds(self, plan: Plan) -> float:
        """Estimate the run: reading and writing overlap computing, and share the disk.

        It is of a machine that does nothing else. Rough: the refinement of ACE is counted even where no
        gate will fire, elementwise methods are bound by memory rather than products, and a file read a
        moment ago comes from memory.
        """
        moved = 0.0 if self.read is None else (plan.read_bytes + plan.write_bytes) / self.read
        eigen = sum(item.eigen_flops for item in plan.items)
        return max((plan.flops - eigen) / self.flops + eigen / self.eigen, moved)

    @property
    def is_busy(self) -> bool:
        """Whether others used the processors while they were measured."""
        return self.share < _BUSY


def measure_speed(recipe: Recipe, dtype: torch.dtype, device: str, threads: int | None) -> Speed:
    """Measure for about a second.

    Raises:
        InputError: the device cannot be used.
    """
    target = usable_device(device)
    product = torch.ones(_PRODUCT_SIDE, _PRODUCT_SIDE, dtype=dtype, device=target)
    generator = torch.Generator().manual_seed(0)
    symmetric = torch.randn(_EIGEN_SIDE, _EIGEN_SIDE, generator=generator, dtype=torch.float64)
    symmetric = (symmetric + symmetric.mT).to(target)
    with torch_threads(threads):
        products, share = _timed(lambda: (product @ product)[0, 0], target)
        at_once = torch.get_num_threads() if target.type == "cpu" else 1
    with torch_threads(1):  # layers are dealt to the cores, on which eigenproblems scale badly
        problems, _ = _timed(lambda: eigh(symmetric)[0][0], target)
    experts = [expert.source for expert in recipe.experts.values()]
    sources = experts if recipe.base is None else [recipe.base, *experts]
    file = next(_weight_files(sources), None)
    return Speed(
        2.0 * _PRODUCT_SIDE**3 / products,
        at_once * eigh_cost(_EIGEN_SIDE).eigen / problems,
        share,
        None if file is None else _read_rate(file),
        file,
    )


def _timed(work: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """Return the seconds that work takes where nothing else runs, the best of several, and `Speed.share`.

    On a CPU they are processor seconds, each of so many threads': others that run there make the clock's
    longer, and not these.
    """
    work().item()  # the first pays for starting the threads
    threads, clock, used, begun = torch.get_num_threads(), 0.0, 0.0, time.perf_counter()
    best, times = float("inf"), 0
    while times < _TIMES or time.perf_counter() - begun < _SECONDS:
        start, before = time.perf_counter(), time.process_time()
        work().item()  # reading one number waits for the device
        wall, processors = time.perf_counter() - start, time.process_time() - before
        clock, used, times = clock + wall, used + processors, times + 1
        best = min(best, wall if device.type != "cpu" else min(wall, processors / threads))
    return best, 1.0 if device.type != "cpu" else min(1.0, used / (clock * threads))


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
