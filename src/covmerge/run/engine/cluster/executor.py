"""The executor of a Ray cluster: items as its tasks. Paths travel to them, and tensors never do."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex
from typing import Any, Generic, TypeVar

import torch

from covmerge.base.errors import InputError, ResourceError
from covmerge.base.settings import Hint, caller_now, hints_for
from covmerge.base.sizes import format_size
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint, at_once
from covmerge.plan.planning.operations import BASE
from covmerge.run.engine.budget import PROCESS_HOLDS
from covmerge.run.engine.cluster.connection import WORKER_CACHE, Opening, Setup, connect, ray_module
from covmerge.run.engine.devices import check_room, usable_device
from covmerge.run.engine.executor import (
    Batch,
    Done,
    Executor,
    Opener,
    Task,
    largest_first,
    moved_together,
    portable,
)
from covmerge.run.engine.hashing import Contents, Hashes, Hashing, WeightsCheck, in_order, to_share
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.outputs import in_memory
from covmerge.run.engine.worker import check_there, cores_of, serve

_RETRIES = 3  # of a task whose process or node was lost

_Piece = TypeVar("_Piece")


@dataclass(frozen=True)
class _Tasks(Generic[_Piece]):
    """Tasks of a cluster, one for each piece of work; Ray does one again whose process or node is lost.

    Attributes:
        ray: connected to the cluster.
        do: what a task does with what is `given` and a piece; an error is returned, and raised here.
        given: of all tasks; references stay references.
        needs: what a node must have free for a piece, as Ray's options of its task.
        most: tasks that the cluster is given at once, by the number of its cores.
        called: what a task does with a piece, for messages.
        advice: the end of the message if Ray could not.
    """

    ray: Any
    do: Callable[..., Any]
    given: tuple[Any, ...]
    needs: Callable[[_Piece], dict[str, Any]]
    most: Callable[[int], int]
    called: Callable[[_Piece], str]
    advice: str = ""

    def answers(
        self, waiting: Iterator[_Piece], running: dict[Any, _Piece], every: float
    ) -> Iterator[tuple[_Piece, Any] | None]:
        """Yield each piece with what came of it; None after seconds without an answer.

        `running` has the tasks that the cluster was given, also after an error.
        """
        while self._submit(waiting, running):
            ended, _ = self.ray.wait(list(running), timeout=every)
            if not ended:
                yield None
            for reference in ended:
                piece = running.pop(reference)
                yield piece, self._answer(reference, piece)

    def all(
        self, sizes: Mapping[_Piece, int], is_over: Callable[[], bool] = lambda: False
    ) -> dict[_Piece, Any]:
        """Do pieces that are only read, the largest first.

        Raises:
            ResourceError: the nodes that did a piece were lost again and again.
            CancelledError: it is over.
        """
        found: dict[_Piece, Any] = {}
        waiting = largest_first(sizes, lambda piece: sizes[piece])
        for answer in self.answers(waiting, {}, _ASKS_EVERY):
            if is_over():
                # Tasks under way only read, and are left to it: see `Cluster._end` on cancelling them.
                raise CancelledError("what nodes read was stopped")
            if answer is not None:
                found[answer[0]] = answer[1]
        return found

    def _submit(self, waiting: Iterator[_Piece], running: dict[Any, _Piece]) -> bool:
        """Give the cluster as much as keeps it busy; False: nothing is left to do or to wait for."""
        most = self.most(int(self.ray.cluster_resources().get("CPU", 1)))
        while len(running) < most and (piece := next(waiting, None)) is not None:
            function = self.ray.remote(self.do)
            function = function.options(max_retries=_RETRIES, **self.needs(piece))
            running[function.remote(*self.given, piece)] = piece
        return bool(running)

    def _answer(self, reference: Any, piece: _Piece) -> Any:
        try:
            answer = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise ResourceError(
                f"Ray could not {self.called(piece)}, which it tried {1 + _RETRIES} times "
                f"({type(error).__name__}: {str(error).splitlines()[0]}){self.advice}"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


# Files of the output and of the sources, a task each.

_ASKS_EVERY = 0.2  # seconds, whether it is all over
_CORES_A_FILE = 2  # two threads hash it
_CORES_A_HASH = 4  # the others merge


def _reading(
    ray: Any,
    do: Callable[..., Any],
    given: tuple[Any, ...],
    called: Callable[[_Piece], str],
    cores: int,
) -> _Tasks[_Piece]:
    """Return tasks that only read. One computes on a core at a time for each `cores` of the cluster."""
    needs = {"num_cpus": 1, "memory": PROCESS_HOLDS}
    return _Tasks(ray, do, given, lambda _: needs, lambda there: max(1, there // cores), called)


def _read(
    key: str, opening: list[Any], file_check: WeightsCheck, name: str
) -> Json | BaseException:
    """Read a file, in a process of the cluster."""
    try:
        return file_check(WORKER_CACHE.sources(key, opening[0]).checkpoints[BASE], name)
    except Exception as error:
        return portable(error)


class ClusterHashing:
    """Hashes that the nodes take beside their items."""

    def __init__(self, ray: Any, key: str, opening: Any, contents: Contents) -> None:
        self._tasks: _Tasks[tuple[str, str]] = _reading(
            ray, _hash, (key, [opening]), "hash '{0[1]}' of {0[0]}".format, _CORES_A_HASH
        )
        self._contents = contents
        self._stopped = threading.Event()
        self._pool = ThreadPool(1, "covmerge-hash")

    def __enter__(self) -> ClusterHashing:
        sizes = {(key, content.name): content.size for key, content in to_share(self._contents)}
        self._hashing: Future[Mapping[tuple[str, str], str]] = self._pool.submit(
            self._tasks.all, sizes, self._stopped.is_set
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown()

    def follow(self, share: float) -> None:
        """See `Hashing`; nodes do not wait for their readers, as they come to files in any order."""

    def result(self) -> Hashes:
        return in_order(self._contents, self._hashing.result())


def _hash(key: str, opening: list[Any], place: tuple[str, str]) -> str | BaseException:
    """Hash a file, in a process of the cluster."""
    source, name = place
    try:
        checkpoint = WORKER_CACHE.sources(key, opening[0]).checkpoints[source]
        content = next(one for one in checkpoint.contents() if one.name == name)
        return content.hash(at_once)
    except Exception as error:
        return portable(error)


# Small items go to one task together, as far as every core has several: to start one takes a millisecond.
_LOAD_BYTES = 64 * 2**20
_LOADS_A_CORE = 8
_AHEAD = 2  # tasks that wait for each core
_ENDING = 60.0  # seconds that a merge which ends early waits for its tasks
_CHECKS_EVERY = 60.0  # seconds without an answer before a check that there can be one
_WAIT = 0.2  # seconds between two reads of what another machine wrote
CLIENT_HOLDS = 256 * 2**20  # bytes that Ray takes in the process that gives out the work

_Load = Sequence[tuple[int, Batch]]


class Cluster(Executor):
    """An executor. Its process keeps the journal, and reads back what other machines have written.

    A task whose process or node is lost is done again by Ray. One that counts returns its counters, and
    so every row is counted once, however often it was read. The process of a task takes at most
    `max_memory` bytes; None: what its node has.

    Raises:
        InputError: there is no Ray, or no cluster at the address.
    """

    def __init__(self, address: str, opener: Opener, max_memory: int | None) -> None:
        self._ray, self._joined = connect(address)
        self._max_memory = max_memory
        self._key = token_hex(8)
        self._opening = self._ray.put(Opening(opener))

    def run(self, batches: Iterable[tuple[int, Batch]], task: Task) -> Generator[Done]:
        """See `Executor.run`.

        Raises:
            ResourceError: no node is large enough for an item, or its tasks were lost again and again.
        """
        if in_memory(task.outputs):
            raise InputError(
                f"a merge in memory cannot be shared by machines: leave out {Hint('executor', 'ray')}"
            )
        ray, threads = self._ray, torch.get_num_threads()
        setup = ray.put(Setup(replace(task, sources=Sources({})), threads, caller_now()))
        cores = int(ray.cluster_resources().get("CPU", 1))
        waiting = largest_first(_loads(list(batches), cores), _size)
        here = ray.get_runtime_context().get_node_id()
        running: dict[Any, _Load] = {}

        def needs(load: _Load) -> dict[str, Any]:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            return needs_of(load, task, threads, nodes, self._max_memory)

        def most(cores: int) -> int:
            return 1 + _AHEAD * cores

        # References in a list: one alone would be looked up anew for every task.
        given = (self._key, [self._opening, setup])
        advice = ". Is the memory of its nodes too small?"
        tasks = _Tasks[_Load](ray, _do, given, needs, most, _called, advice)
        try:
            for found in tasks.answers(waiting, running, _CHECKS_EVERY):
                if found is None:
                    _warn_if_no_node_is_left(running.values(), needs)
                    continue
                load: _Load = found[0]
                answer: _Answer = found[1]
                if answer.counts is not None:
                    assert task.selections is not None
                    task.selections.absorb_counted(memoryview(answer.counts))
                for done in answer.done:
                    if answer.node != here:
                        batch = dict(load)[done.index]
                        check_there(done, batch, task, "another node", partial(time.sleep, _WAIT))
                    yield _now(done, answer.ended)
        finally:
            self._end(running)

    def hashing(self, contents: Contents) -> Hashing:
        return ClusterHashing(self._ray, self._key, self._opening, contents)

    def read_files(
        self, sizes: Mapping[str, int], file_check: WeightsCheck, base: Checkpoint
    ) -> Mapping[str, Json]:
        """See `Executor.read_files`: by tasks, a file each, whose processes open the base themselves."""
        given = (self._key, [self._opening], file_check)
        tasks: _Tasks[str] = _reading(self._ray, _read, given, "read '{}'".format, _CORES_A_FILE)
        found = tasks.all(sizes)
        return {name: found[name] for name in sizes}

    def close(self) -> None:
        if self._joined:  # else this process was in the cluster before
            self._ray.shutdown()

    def _end(self, running: Mapping[Any, _Load]) -> None:
        """See to it that nothing writes any more when the merge has ended early.

        Who leaves the cluster ends its tasks by that, others wait for them. `ray.cancel` is for neither: if
        a task is just about to begin, Ray 2.60 aborts the process that cancels it ("Tried to complete task
        that was not pending").
        """
        if running and not self._joined:
            with suppress(Exception):  # why it ended is said
                self._ray.wait(
                    list(running), num_returns=len(running), timeout=_ENDING, fetch_local=False
                )


def _called(load: _Load) -> str:
    names = ", ".join(dict.fromkeys(batch[0].tensor.name for _, batch in load[:3]))
    return f"do '{names}'"


def _warn_if_no_node_is_left(
    loads: Iterable[_Load], needs: Callable[[_Load], dict[str, Any]]
) -> None:
    """Warn of a task that waits for a node that is lost; a cluster that grows may bring another."""
    try:
        for load in loads:
            needs(load)
    except ResourceError as error:
        warnings.warn(
            f"{error}. The merge waits for a node that may; interrupted, it can be resumed",
            stacklevel=1,
        )


@dataclass(frozen=True)
class _Answer:
    """What became of a load."""

    done: Sequence[Done]
    counts: bytes | None
    node: str
    ended: float


def _do(key: str, given: list[Any], load: _Load) -> _Answer | BaseException:
    """Do a load, in a process of the cluster."""
    opening, reference = given
    try:
        sources, setup = WORKER_CACHE.sources(key, opening), WORKER_CACHE.setup(reference)
        counted = None if setup.task.selections is None else setup.task.selections.emptied()
        task = replace(setup.task, sources=sources, selections=counted)
        with hints_for(setup.caller):
            _check_device(load, setup.task.context.device)
            done = [
                one for index, batch in load for one in serve(index, batch, task, setup.threads)
            ]
        counts = None if counted is None else counted.counted()
        node: str = ray_module().get_runtime_context().get_node_id()
        return _Answer(done, counts, node, time.perf_counter())
    except Exception as error:
        return portable(error)


def needs_of(
    load: _Load,
    task: Task,
    threads: int,
    nodes: Sequence[Mapping[str, float]],
    max_memory: int | None,
) -> dict[str, Any]:
    """Return what a node must have free for a load, as Ray's options of its task.

    An item that takes all cores takes `threads`. `nodes` says what each node has of every resource.
    """
    largest = max((batch for _, batch in load), key=_memory)
    name = largest[0].tensor.name
    gpus = 1 if task.context.device.type == "cuda" else 0
    nodes = [node for node in nodes if node.get("GPU", 0) >= gpus]
    if gpus and not nodes:
        raise ResourceError(
            f"'{name}' is to be computed by {Hint('device', str(task.context.device))}, and no node of "
            "the cluster has "
            f"a GPU that Ray knows of: start one with `--num-gpus`, or leave out {Hint('device')}"
        )
    memory = PROCESS_HOLDS + _memory(largest)
    room = max((node.get("memory", 0) for node in nodes), default=0)
    allowed = room if max_memory is None else min(room, max_memory)
    if memory > allowed:
        raise ResourceError(
            f"'{name}' needs {format_size(memory)} of memory in one process, and no "
            f"node of the cluster may give more than {format_size(int(allowed))} "
            f"({Hint('max_memory')}, and what Ray was started with)"
        )
    cores = max(cores_of(batch, task, threads) for _, batch in load)
    most = max((int(node.get("CPU", 0)) for node in nodes), default=1)
    return {
        "num_cpus": min(cores, max(1, most)),
        "memory": memory,
        **({"num_gpus": gpus} if gpus else {}),
    }


def _check_device(load: _Load, device: torch.device) -> None:
    """Raise InputError where this node has no such device, whatever Ray was told, or no room on it."""
    try:
        usable_device(str(device))
        check_room((batch for _, batch in load), device)
    except InputError as error:
        address = ray_module().util.get_node_ip_address()
        where = f"node {socket.gethostname()} ({address}) of the cluster"
        if isinstance(error, ResourceError):
            raise ResourceError(f"{where}: {error}") from error
        raise InputError(
            f"{where}: {error}. Start Ray there with `--num-gpus 0`, or leave out {Hint('device')}"
        ) from error


def _loads(batches: list[tuple[int, Batch]], cores: int) -> list[list[tuple[int, Batch]]]:
    """Put neighbours together, so that each task is worth its start and each core has several."""
    total = sum(moved_together(batch) for _, batch in batches)
    most = min(_LOAD_BYTES, total // (_LOADS_A_CORE * max(1, cores)))
    loads: list[list[tuple[int, Batch]]] = []
    size = most
    for index, batch in batches:
        moved = moved_together(batch)
        if size + moved > most:
            loads.append([])
            size = 0
        loads[-1].append((index, batch))
        size += moved
    return loads


def _size(load: _Load) -> int:
    return sum(moved_together(batch) for _, batch in load)


def _memory(batch: Batch) -> int:
    return moved_together(batch) + max(item.workspace for item in batch)


def _now(done: Done, ended: float) -> Done:
    """The same by this machine's clock: as if its task had ended now."""
    later = time.perf_counter() - ended
    spans = tuple(replace(s, start=s.start + later, stop=s.stop + later) for s in done.spans)
    return replace(done, spans=spans)
