"""A model whose blocks have their weights in memory one at a time, run on all batches together.

A model of eight billion parameters takes 32 GB in float32, and a block of it one. So what lies in the
blocks is read when the blocks are run: all batches go through one before any goes on to the next, and
each weight is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn

from covmerge.base.errors import InputError
from covmerge.base.memory import give_back
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.statistics.examples import Batch
from covmerge.plan.statistics.lockstep import in_lockstep
from covmerge.plan.statistics.model import Layer, RunningModel, load_model
from covmerge.plan.statistics.unread import is_placeholder, placeholder, unread

_MOST_BATCHES = 1000  # each waits in a thread


class Blocks:
    """A model without its head, of which one block at a time has weights.

    Args:
        checkpoint: a folder, or a repository of the Hub.
        device: where it runs.

    Raises:
        InputError: as `load_model`.
    """

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
        # What is tied to a parameter in no block is needed before any is run.
        self._fill([p for p in self.model.backbone.parameters() if id(p) not in within])

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def run(
        self,
        batches: Sequence[Batch],
        watching: Callable[[Batch, Sequence[Layer]], AbstractContextManager[object]],
        passed: Callable[[Batch], object],
    ) -> Generator[Sequence[Layer]]:
        """Run all batches through all blocks; yield the layers that have been called with all of them.

        Args:
            batches: on the CPU.
            watching: entered with a batch and the layers that it may come to.
            passed: called with every batch behind every block, and before the first.

        Raises:
            InputError: the model cannot run on them, or there are too many.
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

    def _layers(self) -> tuple[list[list[Layer]], list[Layer]]:
        """The layers of each block, and those in none."""
        within = {id(m): n for n, block in enumerate(self._blocks) for m in block.modules()}
        of_block: list[list[Layer]] = [[] for _ in self._blocks]
        rest: list[Layer] = []
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
    with torch.no_grad():  # which each thread has to be told
        model.run(batch)
