"""Pieces of work as tasks of a Ray cluster, some on their way at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from covmerge.base.errors import ResourceError
from covmerge.run.engine.budget import PROCESS_HOLDS
from covmerge.run.engine.order import largest_first

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
