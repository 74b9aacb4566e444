"""Files of the output and of the sources, read as tasks of a Ray cluster, a file each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from covmerge.base.errors import ResourceError
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json
from covmerge.files.checkpoints.content import at_once
from covmerge.plan.planning.operations import BASE
from covmerge.run.engine.budget import PROCESS_HOLDS
from covmerge.run.engine.cluster.worker_cache import WORKER_CACHE
from covmerge.run.engine.hashing import Contents, Hashes, in_order, to_share
from covmerge.run.engine.order import largest_first
from covmerge.run.engine.portable import portable
from covmerge.run.engine.reading import FileCheck

_RETRIES = 3  # of a task whose process or node was lost
_LOOKS_EVERY = 0.2  # seconds, whether it is all over

_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Pieces(Generic[_Name]):
    """What nodes only read, a core and a task for each piece; Ray does one again whose node is lost.

    Args:
        ray: connected to the cluster.
        do: what a task does with what is `given` and a piece; an error is returned, and raised here.
        given: of all tasks; references stay references.
        called: what is done with a piece, for messages.
        part: of how many cores one does it at a time.
    """

    ray: Any
    do: Callable[..., Any]
    given: tuple[Any, ...]
    called: Callable[[_Name], str]
    part: int

    def all(
        self, sizes: Mapping[_Name, int], is_over: Callable[[], bool] = lambda: False
    ) -> dict[_Name, Any]:
        """Do all pieces, the largest first.

        Args:
            sizes: bytes of each.
            is_over: whether nobody waits for them any more.

        Raises:
            ResourceError: the nodes that did a piece were lost again and again.
            CancelledError: it is over.
        """
        waiting = largest_first(sizes, lambda name: sizes[name])
        found: dict[_Name, Any] = {}
        running: dict[Any, _Name] = {}
        while self._submit(waiting, running):
            ready, _ = self.ray.wait(list(running), timeout=_LOOKS_EVERY)
            if is_over():
                # Tasks under way only read, and are left to it: see `Cluster._end` on cancelling them.
                raise CancelledError("what nodes read was stopped")
            for reference in ready:
                name = running.pop(reference)
                found[name] = self._answer(reference, name)
        return found

    def _submit(self, waiting: Iterator[_Name], running: dict[Any, _Name]) -> bool:
        """Give the cluster as much as it does at once; False: nothing is left."""
        most = max(1, int(self.ray.cluster_resources().get("CPU", 1)) // self.part)
        while len(running) < most and (name := next(waiting, None)) is not None:
            function = self.ray.remote(self.do).options(
                max_retries=_RETRIES, num_cpus=1, memory=PROCESS_HOLDS
            )
            running[function.remote(*self.given, name)] = name
        return bool(running)

    def _answer(self, reference: Any, name: _Name) -> Any:
        try:
            answer = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise ResourceError(
                f"Ray could not {self.called(name)}, which it tried {1 + _RETRIES} times "
                f"({type(error).__name__}: {str(error).splitlines()[0]})"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


_CORES_A_FILE = 2  # two threads hash it


def read_on_cluster(
    ray: Any, key: str, opening: Any, sizes: Mapping[str, int], file_check: FileCheck
) -> dict[str, Json]:
    """Let nodes read the files, and return what was found of each; see `Executor.read_files`.

    Args:
        ray: connected to the cluster.
        key: of the executor.
        opening: reference to how its processes open the sources.
        sizes: bytes of each file.
        file_check: what is done with a file.

    Raises:
        ResourceError: the nodes that read a file were lost again and again.
    """
    found = Pieces[str](
        ray, _read, (key, [opening], file_check), "read '{}'".format, _CORES_A_FILE
    ).all(sizes)
    return {name: found[name] for name in sizes}


def _read(key: str, opening: list[Any], file_check: FileCheck, name: str) -> Json | BaseException:
    """Read a file, in a process of the cluster."""
    try:
        return file_check(WORKER_CACHE.sources(key, opening[0]).checkpoints[BASE], name)
    except Exception as error:
        return portable(error)


_CORES_A_HASH = 4  # the others merge


class ClusterHashing:
    """Hashes that the nodes take beside their items.

    Args:
        ray: connected to the cluster.
        key: of the executor.
        opening: reference to how its processes open the sources.
        contents: of all sources.
    """

    def __init__(self, ray: Any, key: str, opening: Any, contents: Contents) -> None:
        self._pieces = Pieces[tuple[str, str]](ray, _hash, (key, [opening]), _called, _CORES_A_HASH)
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
