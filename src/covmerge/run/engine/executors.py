"""The table of executors by name, and the run options that each executor sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from covmerge.base.errors import InputError, RecipeError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.sizes import parse_size
from covmerge.run.engine.cluster.connection import cluster_address, has_gpus
from covmerge.run.engine.devices import AUTO_DEVICE, is_one, named_device
from covmerge.run.engine.options import AUTO, RunOptions
from covmerge.run.engine.progress import as_progress
from covmerge.run.engine.ranks.rank import find_rank

# The run options that a caller gives; the executor decides the others.
_GIVEN = (
    *("device", "threads", "workers", "max_memory", "patience"),
    *("resume", "overwrite", "progress", "collecting"),
)


def run_options(settings: Mapping[str, Any]) -> RunOptions:
    """Return the run options from keyword arguments or flags; other settings are ignored here.

    Without `executor`, threads do the work, or processes where `workers` is above 1 or "auto".

    Raises:
        InputError: the executor does not exist or does not go with the other settings, `patience` is not
            positive, or there is no cluster whose nodes could be asked for their devices.
        RecipeError: `max_memory` is no size, or `threads` is no whole number above 0.
    """
    options = {name: settings[name] for name in _GIVEN if name in settings}
    for name, read in (("max_memory", parse_size), ("progress", as_progress)):
        if options.get(name) is not None:
            try:
                options[name] = read(options[name])
            except RecipeError as error:
                raise RecipeError(f"{Hint(name)}: {error}") from error
    threads: object = options.get("threads")
    if threads is not None and not (isinstance(threads, int) and threads >= 1):
        raise RecipeError(f"{Hint('threads')}: {threads!r} is no whole number above 0: give one")
    if "device" in options:
        options["device"] = str(options["device"])  # a torch.device too
    return _executed_by(settings.get("executor"), RunOptions(**options), settings.get("address"))


def _executed_by(name: str | None, options: RunOptions, address: str | None) -> RunOptions:
    if name is not None and name not in EXECUTORS:
        raise InputError(f"there is no executor '{name}'.{did_you_mean(name, EXECUTORS)}")
    if not options.patience > 0:
        raise InputError(f"{Hint('patience', options.patience)}: give seconds above 0")
    if name in (None, "threads", "processes") and options.patience != RunOptions().patience:
        raise InputError(
            f"{Hint('patience', options.patience)} is of ranks, which wait for each other: give "
            f"{Hint('executor', 'ranks')} too"
        )
    if name != "ray" and address is not None:
        raise InputError(
            f"{Hint('address', address)} is that of a Ray cluster: give {Hint('executor', 'ray')} too"
        )
    return options if name is None else EXECUTORS[name](options, address)


def _by_threads(options: RunOptions, _: str | None) -> RunOptions:
    if options.workers != 1:
        raise InputError(
            f"{Hint('executor', 'threads')} is one process: leave out {Hint('workers')}"
        )
    return options


def _by_processes(options: RunOptions, _: str | None) -> RunOptions:
    return replace(options, workers=AUTO) if options.workers == 1 else options


def _by_ranks(options: RunOptions, _: str | None) -> RunOptions:
    return replace(options, rank=find_rank())


def _by_ray(options: RunOptions, address: str | None) -> RunOptions:
    if options.workers != 1:
        raise InputError(
            f"{Hint('executor', 'ray')}: the cluster says how many work; leave out {Hint('workers')}"
        )
    if is_one(named_device(options.device)):
        raise InputError(
            f"{Hint('device', options.device)}: a task of a cluster computes on the GPU that Ray gives "
            f"it: give {Hint('device', 'cuda')}"
        )
    cluster, device = cluster_address(address), options.device
    if device == AUTO_DEVICE:  # the nodes decide, not this machine
        device = "cuda" if has_gpus(cluster) else "cpu"
    return replace(options, cluster=cluster, device=device)


# Each function takes the caller's options and the address of a cluster, and returns the run options.
EXECUTORS: Mapping[str, Callable[[RunOptions, str | None], RunOptions]] = MappingProxyType(
    {"threads": _by_threads, "processes": _by_processes, "ranks": _by_ranks, "ray": _by_ray}
)
