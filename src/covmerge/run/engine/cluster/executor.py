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
from secrets import token_hex
from typing import Any, Generic, TypeVar

import torch

from covmerge.base.errors import InputError, ResourceError
from covmerge.base.settings import Hint, caller_now, hints_for
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint, at_once
from covmerge.plan.planning.operations import BASE
from covmerge.plan.recipe import format_size
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
from covmerge.run.engine.hashing import Contents, FileCheck, Hashes, Hashing, in_order, to_share
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.worker import check_there, cores_of, serve

# Files of the output and of the sources, read as tasks of a Ray cluster, a file each.

_RETRIES = 3  # of a task whose process or node was lost
_ASKS_EVERY = 0.2  # seconds, whether it is all over

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

        Raises:
            ResourceError: the nodes that did a piece were lost again and again.
            CancelledError: it is over.
        """
        waiting = largest_first(sizes, lambda name: sizes[name])
        found: dict[_Name, Any] = {}
        running: dict[Any, _Name] = {}
        while self._submit(waiting, running):
            ready, _ = self.ray.wait(list(running), timeout=_ASKS_EVERY)
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
    """Hashes that the nodes take beside their items."""

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


# Small items go to one task together, as far as every core has several: to start one takes a millisecond.
_LOAD_BYTES = 64 * 2**20
_LOADS_A_CORE = 8
_AHEAD = 2  # tasks that wait for each core
_ENDING = 60.0  # seconds that a merge which ends early waits for its tasks
_CHECKS_EVERY = 60.0  # seconds without an answer before a check that there can be one
_WAIT = 0.2  # seconds between two reads of what another machine wrote

_Load = Sequence[tuple[int, Batch]]


class Cluster(Executor):
    """An executor. Its process keeps the journal, and reads back what other machines have written.

    A task whose process or node is lost is done again by Ray. One that counts returns its counters, and
    so every row is counted once, however often it was read.

    Args:
        address: of the cluster, as `ray.init` takes it.
        opener: opens the sources; it is pickled.
        max_memory: bytes that the process of a task may take; None: what its node has.

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
        if task.outputs and not all(output.in_files for output in task.outputs):
            raise InputError(
                f"a merge in memory cannot be shared by machines: leave out {Hint('executor', 'ray')}"
            )
        ray, threads = self._ray, torch.get_num_threads()
        setup = ray.put(Setup(replace(task, sources=Sources({})), threads, caller_now()))
        given = [self._opening, setup]
        cores = int(ray.cluster_resources().get("CPU", 1))
        loads = _loads(list(batches), cores)
        waiting = largest_first(loads, _size)
        here = ray.get_runtime_context().get_node_id()
        running: dict[Any, _Load] = {}
        try:
            while self._submit(waiting, running, given, task, threads):
                ended, _ = ray.wait(list(running), timeout=_CHECKS_EVERY)
                if not ended:
                    self._say_if_no_node_is_left(running.values(), task, threads)
                    continue
                load = running.pop(ended[0])
                answer = self._answer(ended[0], load)
                if answer.counts is not None:
                    assert task.selections is not None
                    task.selections.absorb_counted(memoryview(answer.counts))
                for done in answer.done:
                    if answer.node != here:
                        batch = dict(load)[done.index]
                        check_there(done, batch, task, "another node", _pause)
                    yield _now(done, answer.ended)
        finally:
            self._end(running)

    def hashing(self, contents: Contents) -> Hashing:
        """See `Executor.hashing`: by tasks, a file each."""
        return ClusterHashing(self._ray, self._key, self._opening, contents)

    def read_files(
        self, sizes: Mapping[str, int], file_check: FileCheck, base: Checkpoint
    ) -> Mapping[str, Json]:
        """See `Executor.read_files`: by tasks, a file each, whose processes open the base themselves."""
        del base
        return read_on_cluster(self._ray, self._key, self._opening, sizes, file_check)

    def close(self) -> None:
        """See `Executor.close`: leave the cluster, unless this process was in it before."""
        if self._joined:
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

    def _submit(
        self,
        waiting: Iterator[_Load],
        running: dict[Any, _Load],
        given: list[Any],
        task: Task,
        threads: int,
    ) -> bool:
        """Give the cluster as much as keeps it busy; False: nothing is left to do or to wait for."""
        most = 1 + _AHEAD * int(self._ray.cluster_resources().get("CPU", 1))
        while len(running) < most and (load := next(waiting, None)) is not None:
            needs = needs_of(load, task, threads, self._nodes(), self._max_memory)
            function = self._ray.remote(_do).options(max_retries=_RETRIES, **needs)
            # In a list: a reference alone would be looked up anew for every task.
            running[function.remote(self._key, given, load)] = load
        return bool(running)

    def _say_if_no_node_is_left(self, loads: Iterable[_Load], task: Task, threads: int) -> None:
        """Warn of a task that waits for a node that is lost; a cluster that grows may bring another."""
        try:
            nodes = self._nodes()
            for load in loads:
                needs_of(load, task, threads, nodes, self._max_memory)
        except ResourceError as error:
            warnings.warn(
                f"{error}. The merge waits for a node that may; interrupted, it can be resumed",
                stacklevel=1,
            )

    def _nodes(self) -> list[Mapping[str, float]]:
        """What each node that is there has of every resource."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _answer(self, reference: Any, load: _Load) -> _Answer:
        lost = self._ray.exceptions.RayError
        try:
            answer: _Answer | BaseException = self._ray.get(reference)
        except lost as error:
            names = ", ".join(dict.fromkeys(batch[0].tensor.name for _, batch in load[:3]))
            raise ResourceError(
                f"Ray could not do '{names}', which it tried {1 + _RETRIES} times "
                f"({type(error).__name__}: {str(error).splitlines()[0]}). Is the memory of its nodes too "
                "small?"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


@dataclass(frozen=True)
class RayCluster:
    """The nodes of a Ray cluster, which do the work of a run.

    Attributes:
        address: of the cluster, as `ray.init` takes it.
        device: where its nodes compute.
        client_holds: bytes that Ray takes in the process that gives out the work.
    """

    address: str
    device: torch.device
    client_holds: int = 256 * 2**20

    def executor(self, opener: Opener, max_memory: int | None) -> Cluster:
        """Return what gives its nodes the work."""
        return Cluster(self.address, opener, max_memory)


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

    Args:
        load: of the task.
        task: what its items have in common.
        threads: of an item that takes all cores.
        nodes: what each node has of every resource.
        max_memory: bytes that the process of a task may take; None: what its node has.
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


def _pause() -> None:
    time.sleep(_WAIT)


def _now(done: Done, ended: float) -> Done:
    """The same by this machine's clock: as if its task had ended now."""
    later = time.perf_counter() - ended
    spans = tuple(replace(s, start=s.start + later, stop=s.stop + later) for s in done.spans)
    return replace(done, spans=spans)
