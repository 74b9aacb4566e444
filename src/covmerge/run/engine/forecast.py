"""What a merge would take on machines that are not here: bytes, seconds, and what bounds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from covmerge.base.errors import ResourceError
from covmerge.plan.planning import Plan, WorkItem
from covmerge.plan.recipe import format_size
from covmerge.run.engine.budget import PROCESS_HOLDS
from covmerge.run.engine.hardware import Hardware
from covmerge.run.engine.ranks.shares import shares
from covmerge.run.engine.reading import files_at_once
from covmerge.run.engine.survey import survey_bytes


@dataclass(frozen=True)
class Stage:
    """A part of the merge that no other runs beside.

    Attributes:
        name: what is done.
        seconds: that it takes.
        bound: what it waits for; where it computes, the kind of work that takes longest.
        times: seconds that each of its resources is busy; the longest is the stage's.
        computing: of these, seconds of each kind of work in `compute`.
        link_bytes: over each link of the busiest node, and over the storage that all share.
        total_bytes: over the links of all nodes.
    """

    name: str
    seconds: float
    bound: str
    times: Mapping[str, float]
    computing: Mapping[str, float]
    link_bytes: Mapping[str, int]
    total_bytes: int


@dataclass(frozen=True)
class Forecast:
    """The stages, one after the other.

    Attributes:
        hardware: that it is for.
        stages: in order.
        memory: bytes that the processes of a node take together, at least.
        tensor: the largest item's.
    """

    hardware: Hardware
    stages: tuple[Stage, ...]
    memory: int
    tensor: str

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def bottleneck(self) -> str:
        """What most of the time is spent waiting for."""
        waits: defaultdict[str, float] = defaultdict(float)
        for stage in self.stages:
            waits[stage.bound] += stage.seconds
        return _longest(waits)


def forecast(
    plan: Plan, hardware: Hardware, sources: Sequence[Sequence[int]], *, sent: bool = False
) -> Forecast:
    """Predict a merge by ranks, one for each GPU or each node; of one alone, by threads.

    A rank reads, computes and writes at once, so a stage takes as long as the busiest of its resources:
    the links of a node, the storage that all share, what a device computes, the largest item alone.
    All sources are hashed beside, a share of the files by each rank, as the output's are at the end. The
    rank that leads does more: it reads back what others have written.

    Args:
        plan: of the merge.
        hardware: what it runs on.
        sources: bytes of what is hashed of each source, file by file, which one core does at a time.
        sent: the output goes to a bucket when it is made.

    Raises:
        ResourceError: the largest item fits no worker of a node.
    """
    largest = plan.peak_item
    memory = hardware.workers * (PROCESS_HOLDS + largest.memory)
    if hardware.memory is not None and memory > hardware.memory:
        raise ResourceError(
            f"'{largest.tensor.name}' takes {format_size(largest.memory)} while it is merged, and "
            f"{hardware.workers} processes of a node, each with one as large, take {format_size(memory)} "
            f"of its {format_size(hardware.memory)}: {'fewer GPUs, ' * bool(hardware.gpus)}more memory, or "
            "another method for it"
        )
    stages = [
        _surveying(plan, hardware),
        _merging(plan, hardware, sources),
        _verifying(plan, hardware),
        *([_sending(plan, hardware)] if sent else []),
    ]
    starting = {"processes": hardware.start}
    start = Stage("start", hardware.start, "processes", starting, {}, _carried(hardware, 0, 0), 0)
    return Forecast(
        hardware, (start, *(s for s in stages if s.total_bytes)), memory, largest.tensor.name
    )


def _surveying(plan: Plan, hardware: Hardware) -> Stage:
    """Passes before the merge, of which every node has its part."""
    size = survey_bytes([plan])
    own = size // hardware.nodes
    computing = {"sums": own / hardware.workers / hardware.device_stream}
    return _stage("look over", hardware, own, size, computing=computing)


def _merging(plan: Plan, hardware: Hardware, sources: Sequence[Sequence[int]]) -> Stage:
    """The items, the largest first and each to whoever has least, as `shares` gives them to ranks."""
    sizes = [_moved(item) for item in plan.items]
    count = hardware.nodes * hardware.workers
    given = shares(sizes, count)
    per_node = [
        sum(sizes[place] for own in given[first : first + hardware.workers] for place in own)
        for first in range(0, count, hardware.workers)
    ]
    computing = max(
        (_computing([plan.items[place] for place in own], hardware) for own in given),
        key=lambda kinds: sum(kinds.values()),
    )
    # Nothing of the first item is computed while it is read, and nothing is read while the last is written.
    alone = max(_alone(item, hardware) for item in plan.items)
    moved = sum(sizes)
    led, hashed, beside = 0, 0, 0  # one node finds in its page cache what it has read and written
    if hardware.nodes > 1:
        hashed = sum(map(sum, sources))
        led = plan.write_bytes - plan.write_bytes // hardware.nodes
        beside = led + hashed
    # While one leads, and has more to read, the others come to what is left of its share.
    busiest = max(*per_node, led, (moved + beside) // hardware.nodes)
    busy = {"the largest item": alone, "hashing the sources": _hashing(hardware, sources)}
    return _stage("merge", hardware, busiest, moved + beside, busy, computing)


def _hashing(hardware: Hardware, sources: Sequence[Sequence[int]]) -> float:
    """Seconds of all hashes: one process has a thread for each source, ranks as many for a machine."""
    if hardware.nodes * hardware.workers == 1:
        busiest = max(map(sum, sources), default=0)
        at_once = min(hardware.cores, max(1, len(sources)))
    else:
        files = [size for own in sources for size in own]
        at_once = min(hardware.cores, max(hardware.workers, len(sources)))
        given = shares(files, hardware.nodes * at_once)
        busiest = max(sum(files[place] for place in own) for own in given)
        at_once *= hardware.nodes
    together = sum(map(sum, sources)) / at_once
    return max(busiest, together) / hardware.hash


def _verifying(plan: Plan, hardware: Hardware) -> Stage:
    """Every file of the output, which a rank reads for its hash and its tensors; of an adapter one all."""
    size = plan.write_bytes
    shard = max(1, min(size, plan.recipe.output.shard_size or size))
    files = [min(shard, size - start) for start in range(0, size, shard)]
    alone = plan.recipe.output.format == "adapter"
    count = 1 if alone else hardware.nodes * hardware.workers
    given = [sum(files[place] for place in own) for own in shares(files, count)]
    node = max(
        sum(given[first : first + hardware.workers]) for first in range(0, count, hardware.workers)
    )
    at_once = 1 if alone else files_at_once(len(files), hardware.workers, hardware.cores)
    hashed = max(max(files, default=0), max(given) / at_once)
    return _stage("verify", hardware, node, size, {"hashing the output": hashed / hardware.hash})


def _sending(plan: Plan, hardware: Hardware) -> Stage:
    """The finished output, once more from where it was made, by whoever leads."""
    size = plan.write_bytes
    return _stage("send", hardware, size, size)


def _stage(
    name: str,
    hardware: Hardware,
    node: int,
    total: int,
    busy: Mapping[str, float] = MappingProxyType({}),
    computing: Mapping[str, float] = MappingProxyType({}),
) -> Stage:
    """A stage in which so many bytes go over the links of the busiest node, and of all."""
    carried = _carried(hardware, node, total)
    times = {link: carried[link] / rate for link, rate in hardware.rates.items()}
    if computing:
        times["compute"] = sum(computing.values())
    times |= busy
    resource = _longest(times)
    bound = _longest(computing) if resource == "compute" else resource
    return Stage(name, times[resource], bound, times, computing, carried, total)


def _longest(seconds: Mapping[str, float]) -> str:
    return max(seconds, key=lambda key: seconds[key])


def _carried(hardware: Hardware, node: int, total: int) -> dict[str, int]:
    """Bytes over each link: the busiest node's over its own, one behind the other; all over the storage."""
    return {link: node if link in hardware.links else total for link in hardware.rates}


def _moved(item: WorkItem) -> int:
    return item.looked_at + item.read_bytes + item.statistics_bytes + item.write_bytes


def _computing(items: Sequence[WorkItem], hardware: Hardware) -> dict[str, float]:
    """Seconds of a device in each kind of work; `sums`: what is stored is made numbers and added up."""
    products = sum(item.flops - item.eigen_flops for item in items)
    return {
        "products": products / hardware.device_flops,
        "eigenproblems": sum(item.eigen_flops for item in items) / hardware.device_eigen,
        "sums": sum(map(_moved, items)) / hardware.device_stream,
    }


def _alone(item: WorkItem, hardware: Hardware) -> float:
    computing = sum(_computing([item], hardware).values())
    return _moved(item) / min(hardware.links.values()) + computing
