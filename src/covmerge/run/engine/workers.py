"""How many processes a merge is worth: what `--workers auto` decides, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import format_size
from covmerge.run.engine.executor import moved_together
from covmerge.run.engine.global_pass import global_pass_bytes
from covmerge.run.engine.thread_count import usable_cores

Workers = int | Literal["auto"]
AUTO = "auto"

# Below, the seconds that the processes take to start are a good part of the merge.
_SMALL = 8 * 2**30


@dataclass(frozen=True)
class Choice:
    """How many processes, and why."""

    workers: int
    why: str


def choose_workers(
    plans: Sequence[Plan],
    *,
    device: torch.device,
    threads: int,
    cores: int | None = None,
    gpus: int = 0,
    in_memory: bool = False,
) -> Choice:
    """Choose by what the work is, before the memory has its say.

    One process reads in one thread, computes small items on all of its cores at once and large ones on all
    of them one after the other, and writes in one thread. Others help it where there are cores beside its
    own, or where reading and converting is most of the work. On GPUs it is one process for each.

    Args:
        plans: that run together.
        device: where the mathematics runs.
        threads: cores of the CPU that this process computes on.
        cores: of the machine that it may use; None: as the system says.
        gpus: among which processes have a choice.
        in_memory: the result stays in this process.
    """
    cores = usable_cores() if cores is None else cores
    batches = list(zip(*(plan.items for plan in plans), strict=True))
    size = global_pass_bytes(plans) + sum(map(moved_together, batches))
    flops = [sum(item.flops for item in batch) for batch in batches]
    wide = sum(
        work for work, batch in zip(flops, batches, strict=True) if not batch[0].is_narrow(device)
    )
    if in_memory:
        return Choice(1, "the result stays in this process")
    if device.type != "cpu" and gpus < 2:
        return Choice(1, f"the mathematics runs on {device}, which one process keeps busy")
    if device.type == "cpu" and cores < 2:
        return Choice(1, "there is one core")
    if size < _SMALL:
        return Choice(
            1, f"{format_size(size)} are soon read and written, and processes take seconds to start"
        )
    if device.type != "cpu":
        return Choice(min(gpus, len(batches)), f"{gpus} GPUs, a process for each")
    if wide > sum(flops) / 2 and 2 * threads > cores:
        return Choice(1, "most of the mathematics is of matrices that each take all cores")
    workers = min(max(2, cores // threads if threads < cores else cores), len(batches))
    return Choice(workers, f"{format_size(size)} to read and write, and {cores} cores")
