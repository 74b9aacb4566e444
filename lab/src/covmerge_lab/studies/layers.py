"""The experts of a variant, and their layers as a method sees them, read as a merge reads them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from covmerge import parse_recipe
from covmerge.files.tensors.views import matrices
from covmerge.plan.planning.build import build_plans
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.inputs import Sources, dense, read_inputs, take_updates
from covmerge.run.judgement.layers import by_depth
from covmerge.run.sources import open_checkpoints
from covmerge_lab.bench import Bench
from covmerge_lab.suite import Variant

METHOD = "ace"  # whose layers the studies look at

_CPU = torch.device("cpu")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Layer:
    """One matrix of every expert.

    Attributes:
        name: of its tensor in the base; with its place where a tensor holds several.
        updates: Δ_t `(d_out, d_in)` by expert, float32.
        parameters: ACE's, as a merge of this model family would have them.
    """

    name: str
    updates: Mapping[str, Tensor]
    parameters: Mapping[str, Any]


class Layers:
    """The layers that ACE merges, read when asked for."""

    def __init__(self, items: Iterable[WorkItem], sources: Sources) -> None:
        self._items = {item.tensor.name: item for item in items}
        self._sources = sources

    def all(self) -> Iterator[Layer]:
        """Read them one after another, from input to output."""
        for name in by_depth(self._items):
            yield from self._of_tensor(name)

    def _of_tensor(self, name: str) -> list[Layer]:
        item = self._items[name]
        action = item.tensor.operation
        assert isinstance(action, Merge) and action.layout is not None
        inputs = read_inputs([item], self._sources)
        updates, _ = take_updates(item, inputs, torch.float32, _CPU)
        split = {
            expert: matrices(dense(update, inputs.base, torch.float32, _CPU), action.layout)
            for expert, update in updates.items()
        }
        count = len(next(iter(split.values())))
        return [
            Layer(
                f"{name}[{place}]" if count > 1 else name,
                {expert: found[place] for expert, found in split.items()},
                action.parameters,
            )
            for place in range(count)
        ]


@contextmanager
def open_layers(base: Path, experts: Mapping[str, Path]) -> Generator[Layers]:
    """Open the layers that ACE would merge."""
    recipe = parse_recipe(
        {
            "base": str(base),
            "experts": {name: str(folder) for name, folder in experts.items()},
            "method": METHOD,
        },
        origin="study",
    )
    with open_checkpoints(base, experts, {}) as checkpoints:
        (plan,) = build_plans([recipe], checkpoints.base, checkpoints.experts)
        items = [
            item
            for item in plan.items
            if isinstance(a := item.tensor.operation, Merge) and a.method == METHOD
        ]
        yield Layers(items, checkpoints.sources())


def train(bench: Bench, variant: Variant) -> dict[str, Path]:
    """Return the folders of a variant's experts, trained unless they are there."""
    tasks = tuple(bench.suite.subsets[-1])
    bench.train(variant, tasks)
    return {task: bench.suite.expert(task, variant) for task in tasks}


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Choose `count` of the items, or all, evenly from the first to the last.

    Example:
        >>> spread(range(10), 3), spread("ab", 5)
        ([0, 4, 9], ['a', 'b'])
    """
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[len(items) // 2]]
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]


def short(name: str) -> str:
    """Return a layer's name without what all have.

    Example:
        >>> short("encoder.layer.0.attention.self.query.weight")
        'layer.0.attention.self.query'
    """
    return name.removesuffix(".weight").removeprefix("encoder.")


def numbers(values: Any) -> list[float]:
    """Return a vector as a list; torch's own annotation of it is partial."""
    return values.tolist()
