"""A model whose blocks are loaded one at a time, and run on all batches together.

A model of eight billion parameters takes 32 GB in float32, and one of its blocks about 1 GB. So the
weights of a block are read when the block is run. All batches go through a block before any goes on
to the next, and each weight is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

import torch
from torch import nn

from covmerge.base.errors import InputError
from covmerge.base.memory import give_back
from covmerge.base.settings import Hint
from covmerge.base.threads import start
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.statistics.examples import Batch
from covmerge.plan.statistics.model import (
    ObservedLayer,
    RunningModel,
    is_placeholder,
    load_model,
    placeholder,
    unread,
)

# Runs that go through modules side by side: all runs go through a module before any goes on.
#
# The runs are forward passes of one model on several batches. The model's own code decides which
# modules it calls, and continues after each call. So each run has a thread, and only one thread
# works at a time. The results, and the order of calls of each module, are the same as if the runs
# followed one another.

_Answer = Callable[[], Any]


def in_lockstep(
    runs: Sequence[Callable[[], object]],
    modules: Sequence[nn.Module],
    *,
    visiting: Callable[[int], AbstractContextManager[object]],
    going_on: Callable[[int, int | None], AbstractContextManager[object]],
) -> Generator[int]:
    """Execute runs, each in a thread, that all call given modules; yield a module once all runs passed it.

    Modules that they call themselves belong to them. `visiting` is entered with a module while the runs
    go through it, and `going_on` with a run and its module (None before the first) while that run goes
    through the module and on to the next. Runs and modules are given by their places.

    Raises:
        Exception: the error of the first run that fails; the other runs end.

    Example:
        >>> from contextlib import nullcontext
        >>> import torch
        >>> seen, one, other = [], nn.Identity(), nn.Identity()
        >>> passed = in_lockstep(
        ...     [lambda n=n: other(one(torch.tensor(n))) for n in range(2)],
        ...     [one, other],
        ...     visiting=lambda module: nullcontext(),
        ...     going_on=lambda run, module: nullcontext(seen.append((module, run))),
        ... )
        >>> list(passed), seen
        ([0, 1], [(None, 0), (None, 1), (0, 0), (0, 1), (1, 0), (1, 1)])
    """
    threads = [_Run(run) for run in runs]
    try:
        with _halting(modules):
            for number, thread in enumerate(threads):
                with going_on(number, None):
                    thread.resume(lambda: None)
            while calls := {n: call for n, t in enumerate(threads) if (call := t.call)}:
                module = next(iter(calls.values())).module
                with visiting(module):
                    for number, call in calls.items():
                        if call.module == module:
                            with going_on(number, module):
                                threads[number].resume(_done(call))
                yield module
    finally:
        for thread in threads:
            thread.end()


@dataclass(frozen=True)
class _Call:
    """A call of a module, given by its place."""

    module: int
    forward: _Answer


def _done(call: _Call) -> _Answer:
    """Execute a call in this thread; return a function that gives its value, or raises its error."""
    done: Future[Any] = Future()
    try:
        done.set_result(call.forward())
    except Exception as error:
        done.set_exception(error)
    return done.result


@contextmanager
def _halting(modules: Sequence[nn.Module]) -> Generator[None]:
    """Make every run stop at these modules; other callers call them as usual."""
    forwards = [module.forward for module in modules]
    try:
        for place, (module, forward) in enumerate(zip(modules, forwards, strict=True)):
            module.forward = _halts(place, forward)
        yield
    finally:
        for module, forward in zip(modules, forwards, strict=True):
            module.forward = forward


def _halts(place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def halt(*args: Any, **kwargs: Any) -> Any:
        run = current_thread()
        if isinstance(run, _Run):
            return run.wait_for(_Call(place, lambda: forward(*args, **kwargs)))
        return forward(*args, **kwargs)

    return halt


class _Ended(BaseException):
    """Raised in a run to end it."""


class _Run(Thread):
    """A run in a thread that works only while `resume` waits for it."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.call: _Call | None = None  # that it waits for; None: it has not begun, or has ended
        self._work = work
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._halts: SimpleQueue[_Call | BaseException | None] = SimpleQueue()
        start(self)

    def resume(self, answer: _Answer) -> None:
        """Continue the run with the answer to its call, until it stops again."""
        self._answers.put(answer)
        halt = self._halts.get()
        self.call = halt if isinstance(halt, _Call) else None
        if isinstance(halt, BaseException):
            raise halt

    def wait_for(self, call: _Call) -> Any:
        """Stop the run, called in its own thread, and return the value of the call once resumed."""
        self._halts.put(call)
        return self._answers.get()()

    def end(self) -> None:
        """End the run, if it has not ended yet."""
        self._answers.put(_end)
        self.join()

    def run(self) -> None:
        halt = None
        try:
            self._answers.get()()
            self._work()
        except _Ended:
            pass
        except BaseException as error:
            halt = error
        self._halts.put(halt)


def _end() -> None:
    raise _Ended


_MOST_BATCHES = 1000  # each one waits in a thread


class Blocks:
    """A model without its head; only one of its blocks at a time has weights in memory."""

    def __init__(self, checkpoint: Checkpoint, device: str | torch.device) -> None:
        self.model = load_model(checkpoint, device, head=False, by_block=True)
        names = unread(self.model.skeleton, checkpoint.headers)
        held = dict(self.model.whole.named_parameters(remove_duplicate=False))
        places = self.model.skeleton.places
        found = {name: held[places[name].parameter] for name in names}
        self._unread = {id(p): name for name, p in found.items() if is_placeholder(p)}
        paths = [path for path in self.model.skeleton.blocks if path in names.values()]
        self._blocks: list[nn.Module] = [self.model.whole.get_submodule(path) for path in paths]
        within = {id(p) for block in self._blocks for p in block.parameters()}
        # Parameters outside of blocks, and weights tied to them, are needed before any block is run.
        self._fill([p for p in self.model.backbone.parameters() if id(p) not in within])

    @property
    def count(self) -> int:
        return len(self._blocks)

    def run(
        self,
        batches: Sequence[Batch],
        watching: Callable[[Batch, Sequence[ObservedLayer]], AbstractContextManager[object]],
        passed: Callable[[Batch], object],
    ) -> Generator[Sequence[ObservedLayer]]:
        """Run all batches through all blocks; yield the layers of each block once all batches are through.

        `watching` is entered with a batch and the layers that it may reach. `passed` is called with each
        batch after every block, and before the first.
        """
        if len(batches) > _MOST_BATCHES:
            raise InputError(
                f"{len(batches)} batches are more than the {_MOST_BATCHES} that go through a model side by "
                f"side: pass a larger {Hint('batch_size')}"
            )
        of_block, rest = self._layers()

        @contextmanager
        def visiting(block: int) -> Generator[None]:
            parameters = list(self._blocks[block].parameters())
            self._fill(parameters)
            yield
            self._empty(parameters)

        @contextmanager
        def going_on(run: int, block: int | None) -> Generator[None]:
            layers = rest if block is None else [*of_block[block], *rest]
            with torch.no_grad(), watching(batches[run], layers):
                yield
            passed(batches[run])

        runs = [partial(_without_gradients, self.model, batch) for batch in batches]
        for block in in_lockstep(runs, self._blocks, visiting=visiting, going_on=going_on):
            yield of_block[block]
            give_back()
        yield rest

    def _layers(self) -> tuple[list[list[ObservedLayer]], list[ObservedLayer]]:
        """Return the layers of each block, and the layers outside of blocks."""
        within = {id(m): n for n, block in enumerate(self._blocks) for m in block.modules()}
        of_block: list[list[ObservedLayer]] = [[] for _ in self._blocks]
        rest: list[ObservedLayer] = []
        for layer in self.model.layers():
            place = within.get(id(layer.module))
            (rest if place is None else of_block[place]).append(layer)
        return of_block, rest

    def _fill(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            name = self._unread.get(id(parameter))
            if name is not None:
                value = self.model.checkpoint.read(name)
                parameter.data = value.to(parameter.device, torch.float32)

    def _empty(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if id(parameter) in self._unread:
                parameter.data = placeholder(parameter.shape, parameter.device)


def _without_gradients(model: RunningModel, batch: Batch) -> None:
    with torch.no_grad():  # must be set in each thread
        model.run(batch)
