"""Chooses the number of processes for a merge (`--workers auto`), with the reason."""

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

# Bytes read and written below which starting the processes would take a good part of the merge's time.
_SMALL = 8 * 2**30


@dataclass(frozen=True)
class Choice:
    """A number of processes, and the reason for it."""

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
    """Choose the number of processes by the work; the memory may lower the number later.

    One process reads in one thread, writes in one thread, and computes on all of its cores: small items at
    once, one core each, and large items in turn, on all cores. More processes help if the machine has
    cores beside these, or if reading and converting is most of the work. Each of several GPUs gets a
    process.

    This process computes on `threads` of the machine's `cores` (None: ask the system). `in_memory` says
    whether the result stays in the memory of this process.
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
