"""The hashes of the sources as tasks of a Ray cluster, a file each."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from covmerge.base.threads import ThreadPool
from covmerge.files.checkpoints.content import at_once
from covmerge.run.engine.cluster.pieces import Pieces
from covmerge.run.engine.cluster.worker_cache import WORKER_CACHE
from covmerge.run.engine.hashing import Contents, Hashes, in_order, to_share
from covmerge.run.engine.portable import portable

_PART = 4  # of so many cores one hashes: the others merge


class ClusterHashing:
    """Hashes that the nodes take beside their items.

    Args:
        ray: connected to the cluster.
        key: of the executor.
        opening: reference to how its processes open the sources.
        contents: of all sources.
    """

    def __init__(self, ray: Any, key: str, opening: Any, contents: Contents) -> None:
        self._pieces = Pieces[tuple[str, str]](ray, _hash, (key, [opening]), _called, _PART)
        self._contents = contents
        self._stopped = threading.Event()
        self._pool = ThreadPool(1, "covmerge-hash")

    def __enter__(self) -> ClusterHashing:
        sizes = {(key, content.name): content.size for key, content in to_share(self._contents)}
        self._hashing: Future[Mapping[tuple[str, str], str]] = self._pool.submit(
            self._pieces.all, sizes, self._stopped.is_set
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown()

    def follow(self, share: float) -> None:
        """See `Hashing`; nodes do not wait for their readers, as they come to files in any order."""

    def result(self) -> Hashes:
        """See `Hashing`.

        Raises:
            ResourceError: the nodes that hashed a file were lost again and again.
        """
        return in_order(self._contents, self._hashing.result())


def _called(place: tuple[str, str]) -> str:
    source, name = place
    return f"hash '{name}' of {source}"


def _hash(key: str, opening: list[Any], place: tuple[str, str]) -> str | BaseException:
    """Hash a file, in a process of the cluster."""
    source, name = place
    try:
        checkpoint = WORKER_CACHE.sources(key, opening[0]).checkpoints[source]
        content = next(one for one in checkpoint.contents() if one.name == name)
        return content.hash(at_once)
    except Exception as error:
        return portable(error)
