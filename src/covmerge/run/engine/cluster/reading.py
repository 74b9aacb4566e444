"""The finished output, read as tasks of a Ray cluster, a file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covmerge.base.types import Json
from covmerge.plan.planning import BASE
from covmerge.run.engine.cluster.pieces import Pieces
from covmerge.run.engine.cluster.worker_cache import WORKER_CACHE
from covmerge.run.engine.portable import portable
from covmerge.run.engine.reading import FileCheck

_PART = 2  # of so many cores one has a file: it is hashed by two threads


def read_on_cluster(
    ray: Any, key: str, opening: Any, sizes: Mapping[str, int], look: FileCheck
) -> dict[str, Json]:
    """Let nodes read the files, and return what was found of each; see `Executor.read_files`.

    Args:
        ray: connected to the cluster.
        key: of the executor.
        opening: reference to how its processes open the sources.
        sizes: bytes of each file.
        look: what is done with a file.

    Raises:
        ResourceError: the nodes that read a file were lost again and again.
    """
    found = Pieces[str](ray, _read, (key, [opening], look), "read '{}'".format, _PART).all(sizes)
    return {name: found[name] for name in sizes}


def _read(key: str, opening: list[Any], look: FileCheck, name: str) -> Json | BaseException:
    """Read a file, in a process of the cluster."""
    try:
        return look(WORKER_CACHE.sources(key, opening[0]).checkpoints[BASE], name)
    except Exception as error:
        return portable(error)
