"""The slices of a recipe: views of its sources, and the slice and depth of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from covmerge.files.checkpoints.base import Checkpoint, refuse_adapter
from covmerge.files.tensors.names import layer_name, relative_depth, relative_depths
from covmerge.files.tensors.shown import Stacked, comes_before
from covmerge.plan.moe.architectures import ARCHITECTURES, SHARED
from covmerge.plan.recipe import Mixture, Slice


def stacked(slices: Sequence[Slice], expert: str | None, checkpoint: Checkpoint) -> Checkpoint:
    """Return a source's view for a plan of these slices, or the source if there are none.

    Raises:
        InputError: the source is an adapter, or a model without these layers.
    """
    if not slices:
        return checkpoint
    refuse_adapter(checkpoint, "slices are of models", str(expert))
    order: list[int] = []
    given: list[int] = []
    for piece in slices:
        if expert is None or expert in piece.experts:
            given += range(len(order), len(order) + piece.length)
        order += piece.layers(expert)
    return Stacked(checkpoint, order, given)


class Layers:
    """The depth and the slice of each tensor of an output."""

    def __init__(
        self, slices: Sequence[Slice], names: Iterable[str], moe: Mixture | None = None
    ) -> None:
        self._moe = moe
        self._mixture = None if moe is None else ARCHITECTURES[moe.architecture]
        self._slices = slices
        self._places = [(piece, place) for piece in slices for place in range(piece.length)]
        self._depths = {} if slices else relative_depths(names)

    def depth(self, name: str) -> float:
        """Return a tensor's relative depth, 0 to 1, in its slice or in the model; 0 outside of layers."""
        if not self._slices:
            return self._depths[name]
        layer = layer_name(name)
        if layer is None:
            return 0.0
        piece, place = self._places[layer.index]
        return relative_depth(place, piece.length)

    def experts(self, name: str, experts: Iterable[str]) -> list[str]:
        """Return the experts that take part in a tensor, in the order of its slice."""
        index = self._index(name)
        if index is not None and self._moe is not None:
            if index == SHARED and self._moe.shared is not None:
                return [self._moe.shared.expert]
            return [self._moe.routed(experts)[index]]
        return list(self._slice(name).experts if self._slices else experts)

    def of_expert(self, name: str) -> bool:
        """Return whether a mixture's tensor is copied from the MLP of one expert."""
        return self._index(name) is not None

    def of_base(self, name: str) -> str | None:
        """Return what a mixture's tensor is if it is created with the base, such as "a router", or None."""
        if self._mixture is None or self._index(name) is not None:
            return None
        shared = self._mixture.index(name) == SHARED
        return "the shared expert" if shared else self._mixture.of_base(name)

    def _index(self, name: str) -> int | None:
        """Return the number of the expert that has a tensor in its MLP, SHARED included, or None."""
        if self._mixture is None or self._moe is None:
            return None
        index = self._mixture.index(name)
        return None if index == SHARED and self._moe.shared is None else index

    def parameters(self, name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a tensor's parameters of the recipe's method: its slice's, which override the recipe's."""
        return {**given, **self._slice(name).parameters} if self._slices else given

    def _slice(self, name: str) -> Slice:
        layer = layer_name(name)
        if layer is None:
            return self._slices[0 if comes_before(name) else -1]
        return self._places[layer.index][0]
