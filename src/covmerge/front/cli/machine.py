"""An estimate of a merge's duration, from a test of about two seconds on parts of the merge."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from covmerge.base.errors import CovmergeError
from covmerge.maths.linalg.auto import eigh_cost
from covmerge.maths.linalg.lapack import eigh
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.work import WorkItem
from covmerge.plan.recipe import Recipe
from covmerge.run.engine.devices import usable_device
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.layer import Context
from covmerge.run.engine.outputs import NoOutput
from covmerge.run.engine.progress import Silent
from covmerge.run.engine.run import run
from covmerge.run.engine.thread_count import torch_threads
from covmerge.run.engine.threads import Threads

# Typical sizes of layers: smaller sizes are slower, and larger sizes equally fast.
_PRODUCT_SIDE, _EIGEN_SIDE = 1536, 768
_SECONDS = 0.25  # for each of both measurements, which is repeated at least this often:
_TIMES = 3
_PIECE_BYTES = 32 * 2**20  # bytes to read for an elementwise method
_HASHED_BYTES = 2**22
_BUSY = 0.8  # below this share of the processors' time, other processes use them too
_READ_BYTES = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Speed:
    """The measured rates of this machine."""

    flops: float  # floating-point operations per second, in matrix products of the compute dtype
    # floating-point operations per second in eigenproblems, as plans count them; None if the plan has none
    eigen: float | None
    # share of the requested processors' time that this process got during the measurement; 1 for
    # other devices
    share: float
    # bytes per second read from one source file; None if no source is a local file
    read: float | None
    read_from: Path | None  # the source file that was read
    begun: float = 0.0  # processor seconds for the start and for planning, which a merge needs too
    hashed: float = float("inf")  # bytes per second through SHA-256
    # seconds per byte read, for each elementwise method
    by_entry: Mapping[str, float] = field(default_factory=dict[str, float])
    problem: str = ""  # why a part of the merge could not be run; "" if all could

    def seconds(self, plan: Plan) -> float:
        """Estimate the duration of the run; reading and writing overlap computing, and share the disk.

        The estimate is for a machine without other work. It is rough: the refinement of ACE is
        counted even if no gate fires, and a file that was read a moment ago comes from memory.
        """
        moved = 0.0 if self.read is None else (plan.read_bytes + plan.write_bytes) / self.read
        # The sources are hashed once; the output is hashed twice: by file and by tensor.
        hashed = sum(item.read_bytes for item in plan.items) + 2 * plan.write_bytes
        computed = hashed / self.hashed + sum(map(self._item_seconds, plan.items))
        return self.begun + max(computed, moved)

    def _item_seconds(self, item: WorkItem) -> float:
        method = _method_by_entry(item)
        if method is not None and method in self.by_entry:
            return item.read_bytes * self.by_entry[method]
        products = (item.flops - item.eigen_flops) / self.flops
        # Reading, widening and rounding take as long as the simplest method.
        least = min(self.by_entry.values(), default=0.0)
        problems = 0.0 if self.eigen is None else item.eigen_flops / self.eigen
        return products + problems + item.read_bytes * least

    @property
    def is_busy(self) -> bool:
        """Whether other processes used the processors during the measurement."""
        return self.share < _BUSY


def measure_speed(
    recipe: Recipe, plan: Plan, sources: Sources, device: str, threads: int | None
) -> Speed:
    """Measure this machine's rates for about two seconds.

    If all sources are on this machine, a small part of the plan is run, and its result is discarded.
    """
    begun = time.process_time()
    target, dtype = usable_device(device), plan.compute_dtype
    product = torch.ones(_PRODUCT_SIDE, _PRODUCT_SIDE, dtype=dtype, device=target)
    experts = [expert.source for expert in recipe.experts.values()]
    named = experts if recipe.base is None else [recipe.base, *experts]
    files = list(_weight_files(named))
    pieces = _pieces(plan) if len(files) == len(named) else {}
    context = Context(dtype, target)
    with torch_threads(threads):
        # Reading one number waits for the device.
        products, share = _timed(lambda: (product @ product)[0, 0].item(), target)
        at_once = torch.get_num_threads() if target.type == "cpu" else 1
        by_entry, problem = dict[str, float](), ""
        for method, piece in pieces.items():
            try:
                seconds, _ = _timed(partial(_carry_out, piece, sources, context), target)
            except CovmergeError as error:  # errors about values, which a plan does not check
                problem = str(error)
            else:
                by_entry[method] = seconds / sum(item.read_bytes for item in piece.items)
    has_eigen = any(item.eigen_flops for item in plan.items)
    return Speed(
        2.0 * _PRODUCT_SIDE**3 / products,
        at_once * _eigen_rate(target) if has_eigen else None,
        share,
        _read_rate(files[0]) if files else None,
        files[0] if files else None,
        begun,
        at_once * _hash_rate(),
        by_entry,
        problem,
    )


def _eigen_rate(target: torch.device) -> float:
    """Return the operations per second in eigenproblems on one core: each core has its own layers."""
    generator = torch.Generator().manual_seed(0)
    symmetric = torch.randn(_EIGEN_SIDE, _EIGEN_SIDE, generator=generator, dtype=torch.float64)
    symmetric = (symmetric + symmetric.mT).to(target)
    with torch_threads(1):
        seconds, _ = _timed(lambda: eigh(symmetric)[0][0].item(), target)
    return eigh_cost(_EIGEN_SIDE).eigen / seconds


def _method_by_entry(item: WorkItem) -> str | None:
    """Return the method of an item without matrices; None for an item with matrices, or a copy."""
    merge = item.tensor.merge
    return merge.method if merge is not None and merge.layout is None else None


def _pieces(plan: Plan) -> dict[str, Plan]:
    """Return a small part of the work of each elementwise method, as a plan."""
    found: dict[str, list[WorkItem]] = {}
    for item in sorted(plan.items, key=lambda item: -item.read_bytes):
        method = _method_by_entry(item)
        if method is not None and item.read_bytes:
            found.setdefault(method, []).append(item)
    return {method: _piece(plan, _little(items)) for method, items in found.items()}


def _little(items: list[WorkItem]) -> list[WorkItem]:
    """Return the smallest item, and the largest that fit into a few bytes together."""
    *larger, smallest = items
    taken, size = [smallest], smallest.read_bytes
    for item in larger:
        if size + item.read_bytes <= _PIECE_BYTES:
            taken.append(item)
            size += item.read_bytes
    return taken


def _piece(plan: Plan, items: Sequence[WorkItem]) -> Plan:
    """Return a plan of some of the items, with their part of its global passes."""
    keys = {item.key for item in items}
    passes = (
        replace(one, items=tuple(item for item in one.items if item.key in keys))
        for one in plan.global_passes
    )
    return replace(
        plan, items=tuple(items), global_passes=tuple(one for one in passes if one.items)
    )


def _carry_out(piece: Plan, sources: Sources, context: Context) -> None:
    """Read and merge a part of the plan, and discard the result."""
    in_flight = _PIECE_BYTES + piece.peak_item.memory
    executor = Threads(in_flight=in_flight, lanes=torch.get_num_threads())
    run([(piece, NoOutput())], sources, context, executor=executor, progress=Silent())


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the shortest time of several runs of the work, in seconds, and `Speed.share`.

    On a CPU, the time is that of the processors divided by the number of threads: other processes
    on the same processors lengthen the wall-clock time, but not this one.
    """
    work()  # the first call also starts the threads
    threads, clock, used, begun = torch.get_num_threads(), 0.0, 0.0, time.perf_counter()
    best, times = float("inf"), 0
    while times < _TIMES or time.perf_counter() - begun < _SECONDS:
        start, before = time.perf_counter(), time.process_time()
        work()
        wall, processors = time.perf_counter() - start, time.process_time() - before
        clock, used, times = clock + wall, used + processors, times + 1
        best = min(best, wall if device.type != "cpu" else min(wall, processors / threads))
    return best, 1.0 if device.type != "cpu" else min(1.0, used / (clock * threads))


def _hash_rate() -> float:
    """Return the bytes per second through SHA-256 on one core."""
    content, best = bytes(_HASHED_BYTES), float("inf")
    for _ in range(_TIMES):
        before = time.process_time()
        hashlib.sha256(content)
        best = min(best, time.process_time() - before)
    return _HASHED_BYTES / best


def _weight_files(sources: Iterable[str]) -> Iterator[Path]:
    """Yield the largest weight file of each source that is a local path."""
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
