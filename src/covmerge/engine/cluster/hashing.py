"""The hashes of the sources as tasks of a Ray cluster, a file each."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from covmerge.checkpoints.content import at_once
from covmerge.engine.budget import PROCESS_HOLDS
from covmerge.engine.cluster.kept import KEPT
from covmerge.engine.hashing import Contents, Hashes, in_order, to_share
from covmerge.engine.portable import portable
from covmerge.errors import ResourceError

_RETRIES = 3  # of a task whose process or node was lost
_PART = 4  # of so many cores one hashes: the others merge
_LOOKS_EVERY = 0.2  # seconds, whether it is all over


class ClusterHashing:
    """Hashes that the nodes take beside their items; a file whose node is lost is hashed again by Ray.

    Args:
        ray: connected to the cluster.
        key: of the executor.
        opening: reference to how its processes open the sources.
        contents: of all sources.
    """

    def __init__(self, ray: Any, key: str, opening: Any, contents: Contents) -> None:
        self._ray = ray
        self._key = key
        self._opening = opening
        self._contents = contents
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, "covmerge-hash")

    def __enter__(self) -> ClusterHashing:
        """See `Hashing`."""
        self._hashing: Future[Mapping[tuple[str, str], str]] = self._pool.submit(self._hash_all)
        return self

    def __exit__(self, *_: object) -> None:
        """See `Hashing`."""
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

    def _hash_all(self) -> Mapping[tuple[str, str], str]:
        """What this process does: it keeps some tasks on their way, the largest files first."""
        shared = sorted(to_share(self._contents), key=lambda one: -one[1].size)
        waiting = iter([(key, content.name) for key, content in shared])
        found: dict[tuple[str, str], str] = {}
        running: dict[Any, tuple[str, str]] = {}
        try:
            while self._submit(waiting, running):
                ready, _ = self._ray.wait(list(running), timeout=_LOOKS_EVERY)
                if self._stopped.is_set():
                    raise CancelledError("hashing the sources was stopped")
                for reference in ready:
                    place = running.pop(reference)
                    found[place] = self._answer(reference, *place)
        finally:
            for reference in running:
                with suppress(Exception):
                    self._ray.cancel(reference, force=True)
        return found

    def _submit(
        self, waiting: Iterator[tuple[str, str]], running: dict[Any, tuple[str, str]]
    ) -> bool:
        """Give the cluster as much as it hashes at once; False: nothing is left."""
        most = max(1, int(self._ray.cluster_resources().get("CPU", 1)) // _PART)
        while len(running) < most and (place := next(waiting, None)) is not None:
            function = self._ray.remote(_hash).options(
                max_retries=_RETRIES, num_cpus=1, memory=PROCESS_HOLDS
            )
            running[function.remote(self._key, [self._opening], *place)] = place
        return bool(running)

    def _answer(self, reference: Any, key: str, name: str) -> str:
        try:
            answer: str | BaseException = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise ResourceError(
                f"Ray could not hash '{name}' of {key}, which it tried {1 + _RETRIES} times "
                f"({type(error).__name__}: {str(error).splitlines()[0]})"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _hash(key: str, opening: list[Any], source: str, name: str) -> str | BaseException:
    """Hash a file, in a process of the cluster."""
    try:
        checkpoint = KEPT.sources(key, opening[0]).checkpoints[source]
        content = next(one for one in checkpoint.contents() if one.name == name)
        return content.hash(at_once)
    except Exception as error:
        return portable(error)
