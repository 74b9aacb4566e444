"""The slices of a recipe: views of its sources, and where in which slice a tensor lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from covmerge.files.checkpoints.base import Checkpoint, refuse_adapter
from covmerge.files.tensors.names import layer_name, relative_depth, relative_depths
from covmerge.files.tensors.shown import Stacked, comes_before
from covmerge.plan.moe.architectures import ARCHITECTURES, SHARED
from covmerge.plan.recipe import Mixture, Slice


def stacked(slices: Sequence[Slice], expert: str | None, checkpoint: Checkpoint) -> Checkpoint:
    """Return a source as it looks to a plan of these slices; itself without slices.

    Raises:
        InputError: an adapter, or a model without these layers.
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
    """Where the tensors of an output lie: how deep, and in which slice."""

    def __init__(
        self, slices: Sequence[Slice], names: Iterable[str], moe: Mixture | None = None
    ) -> None:
        self._moe = moe
        self._mixture = None if moe is None else ARCHITECTURES[moe.architecture]
        self._slices = slices
        self._places = [(piece, place) for piece in slices for place in range(piece.length)]
        self._depths = {} if slices else relative_depths(names)

    def depth(self, name: str) -> float:
        """How deep the layer of a tensor lies, from 0 to 1, in its slice or in the model; 0 outside."""
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
            shared = self._moe.shared
            own = None if shared is None or index != SHARED else shared.expert
            return [self._moe.routed(experts)[index] if own is None else own]
        return list(self._slice(name).experts if self._slices else experts)

    def of_expert(self, name: str) -> bool:
        """Whether a tensor of a mixture is part of one expert's MLP, as it is."""
        return self._index(name) is not None

    def of_base(self, name: str) -> str | None:
        """What of the mixture that the experts become is made with the base, not merged; None: no such."""
        if self._mixture is None or self._index(name) is not None:
            return None
        shared = self._mixture.index(name) == SHARED
        return "the shared expert" if shared else self._mixture.of_base(name)

    def _index(self, name: str) -> int | None:
        """The number of the expert whose MLP a tensor is part of, SHARED among them; None: of none's."""
        if self._mixture is None or self._moe is None:
            return None
        index = self._mixture.index(name)
        return None if index == SHARED and self._moe.shared is None else index

    def parameters(self, name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters of the recipe's method for a tensor: its slice's over the recipe's."""
        return {**given, **self._slice(name).parameters} if self._slices else given

    def _slice(self, name: str) -> Slice:
        layer = layer_name(name)
        if layer is None:
            return self._slices[0 if comes_before(name) else -1]
        return self._places[layer.index][0]
