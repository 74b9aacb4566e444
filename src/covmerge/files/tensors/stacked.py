"""A checkpoint with its layers in another order and number, and only some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from covmerge.base.errors import InputError
from covmerge.base.text import some
from covmerge.base.types import Role, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.config_counts import layer_count, restacked
from covmerge.files.checkpoints.view import View
from covmerge.files.tensors.layers import layer_name
from covmerge.files.tensors.names import kind_by_name


class Stacked(View):
    """A view of a checkpoint: its names are those of the model that is stacked.

    Args:
        stored: the checkpoint.
        order: by layer of the stacked model, the layer that it is of this checkpoint, or would be if it
            gave that one.
        given: the layers of the stacked model that it gives.

    Raises:
        InputError: it has no such layers, or its layers are not one stack.
    """

    def __init__(self, stored: Checkpoint, order: Sequence[int], given: Iterable[int]) -> None:
        self._given = frozenset(given)
        stack, count = _stack_of(stored)
        beyond = [order[layer] for layer in self._given if order[layer] >= count]
        if beyond:
            raise InputError(
                f"{stored.source} has the layers 0 to {count - 1}, and a slice asks for layer "
                f"{max(beyond)}: a slice of all of them is [0, {count}]"
            )
        self._last = len(order) - 1
        super().__init__(stored, dict(self._renamed(stored.headers, stack, order)))
        self.order: tuple[int, ...] | None = tuple(order)
        self.config = None if stored.config is None else restacked(stored.config, order)

    def gives(self, name: str) -> bool:
        layer = layer_name(name)
        if layer is not None:
            return layer.index in self._given
        return (0 if comes_before(name) else self._last) in self._given

    def _renamed(
        self, names: Iterable[str], stack: str, order: Sequence[int]
    ) -> Iterable[tuple[str, str]]:
        """Names in the stacked model with those of the checkpoint: what comes first, first."""
        layers: dict[int, list[str]] = {}
        outside: list[str] = []
        for name in names:
            place = layer_name(name)
            if place is None or place.stack != stack:
                outside.append(name)
            else:
                layers.setdefault(place.index, []).append(name)
        yield from ((n, n) for n in outside if comes_before(n) and self.gives(n))
        for layer in sorted(self._given):
            for name in layers.get(order[layer], ()):
                place = layer_name(name)
                assert place is not None
                yield place.at(layer), name
        yield from ((n, n) for n in outside if not comes_before(n) and self.gives(n))


def comes_before(name: str) -> bool:
    """Whether a tensor outside the layers comes before them: embeddings, and what belongs to them.

    Example:
        >>> comes_before("transformer.wpe.weight"), comes_before("model.norm.weight")
        (True, False)
    """
    header = TensorHeader(name, (2, 2), torch.float32)
    return "embed" in name.lower() or kind_by_name(header, {name: header}).role is Role.EMBEDDING


def _stack_of(checkpoint: Checkpoint) -> tuple[str, int]:
    """The stack of layers of a checkpoint, as what stands before their numbers, and how many it has.

    Raises:
        InputError: there is none, or there are several.
    """
    counts: dict[str, int] = {}
    for name, header in checkpoint.headers.items():
        layer = layer_name(name)
        if layer is not None and header.module is None:
            counts[layer.stack] = max(counts.get(layer.stack, 0), layer.index + 1)
    if len(counts) == 1:
        return next(iter(counts.items()))
    if not counts:
        raise InputError(
            f"{checkpoint.source} has no layers to take slices of: none of its names has a number. "
            "Leave out `slices`"
        )
    said = layer_count(checkpoint.config)
    raise InputError(
        f"{checkpoint.source} has several stacks of layers ({some(counts, 4, quoted=True)}; config.json "
        f"says {said}), and slices are of one: leave out `slices`, and merge its parts by `rules`"
    )
