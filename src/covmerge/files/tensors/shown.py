"""Views of checkpoints: restacked layers, untied tensors, and a donor in the place of a missing base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.text import some
from covmerge.base.types import Json, Role, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Content, Quantisation
from covmerge.files.checkpoints.config_counts import TIED, layer_count, restacked, with_parts
from covmerge.files.checkpoints.view import View
from covmerge.files.tensors.names import kind_by_name, layer_name

# A checkpoint with its layers in another order and number, of which it may give only some.


class Stacked(View):
    """A view of a checkpoint that shows its tensors under the names of the stacked model.

    Args:
        stored: the checkpoint.
        order: for each layer of the stacked model, the checkpoint's layer that it is, or would be if given.
        given: the layers of the stacked model that the checkpoint gives.

    Raises:
        InputError: the checkpoint has no such layers, or its layers are not one stack.
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
        """Yield names in the stacked model with those in the checkpoint, in the model's order."""
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
    """Return whether a tensor outside the layers comes before them: an embedding, or a part of one.

    Example:
        >>> comes_before("transformer.wpe.weight"), comes_before("model.norm.weight")
        (True, False)
    """
    header = TensorHeader(name, (2, 2), torch.float32)
    return "embed" in name.lower() or kind_by_name(header, {name: header}).role is Role.EMBEDDING


def _stack_of(checkpoint: Checkpoint) -> tuple[str, int]:
    """Return the checkpoint's stack of layers: the text before their numbers, and the number of layers.

    Raises:
        InputError: there is no stack, or there are several.
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


# A checkpoint whose config ties tensors, shown with each of them as a tensor of its own.

_BLOCK_ELEMENTS = 8 * 2**20


class Untied(View):
    """A view of a checkpoint in which every tied tensor is there, and the config ties none.

    `ties` has, for each tied tensor, stored or not, the stored one to which the config ties it.
    """

    def __init__(self, stored: Checkpoint, ties: Mapping[str, str], *notes: str) -> None:
        names = {name: name for name in stored.headers}
        copies = {name: target for name, target in ties.items() if name not in names}
        super().__init__(stored, names | copies, *notes)
        self.untied: Mapping[str, str] | None = MappingProxyType(dict(ties))
        self.quantisation = stored.quantisation  # by its own names
        self.config = None if stored.config is None else untied_config(stored.config)
        self.shared: Mapping[str, str] = {}


def seen_untied(checkpoint: Checkpoint, ties: Mapping[str, str] | None) -> Checkpoint:
    """Return a base as a merge read it: untied, if covmerge.json says so (`untied`).

    Raises:
        InputError: the base lacks the tensors that were tied.
    """
    if ties is None or checkpoint.untied is not None:
        return checkpoint
    if lost := [name for name in ties.values() if name not in checkpoint.headers]:
        raise InputError(
            f"the base at {checkpoint.source} is another than was merged: it has no '{lost[0]}'"
        )
    return Untied(checkpoint, ties)


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with no tensors tied.

    Example:
        >>> untied_config({"text_config": {"vocab_size": 8}})
        {'text_config': {'vocab_size': 8, 'tie_word_embeddings': False}, 'tie_word_embeddings': False}
    """
    return with_parts(config, lambda _, part: {**part, TIED: False})


def same_values(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Return whether two stored tensors are equal bit for bit; they are read in blocks."""
    header = checkpoint.headers[one]
    return header.shape == checkpoint.headers[other].shape and all(
        torch.equal(checkpoint.read(one, rows), checkpoint.read(other, rows))
        for rows in header.row_blocks(_BLOCK_ELEMENTS)
    )


# The layout of the output of a merge without a base.


class Donor(View):
    """Names, shapes, config and companion files of a merge without a base: those of its first expert.

    In a stacked model, each tensor's layout is that of the first expert that gives the tensor. A donor is
    not a source: its tensors are read from the experts.
    """

    def __init__(self, experts: Mapping[str, Checkpoint]) -> None:
        first = next(iter(experts.values()))
        super().__init__(first)
        self.is_source = False
        self.quantisation: Quantisation | None = None
        self.notes = ()
        givers = [first] if first.order is None else list(experts.values())
        self._owners = {name: giver for giver in reversed(givers) for name in giver.headers}
        names = dict.fromkeys(name for giver in givers for name in giver.headers)
        ordered = names if self.order is None else sorted(names, key=_section)
        self.headers = MappingProxyType({n: self._owners[n].headers[n] for n in ordered})

    def owner(self, name: str) -> Checkpoint:
        """Return the expert that stores a tensor."""
        return self._owners[name]

    def read(self, name: str, rows: range | None = None) -> Tensor:
        return self._owners[name].read(name, rows)

    def materialize(self) -> None:
        """Do nothing: the experts are fetched as sources."""

    def identity(self) -> dict[str, Json]:
        """Return only the kind: the experts have identities of their own."""
        return {"kind": "donor"}

    def contents(self) -> Sequence[Content]:
        """Return nothing: the experts are hashed as sources."""
        return []

    def close(self) -> None:
        """Do nothing: the experts are closed as sources."""


def _section(name: str) -> tuple[int, int]:
    layer = layer_name(name)
    if layer is not None:
        return 1, layer.index
    return (0, 0) if comes_before(name) else (2, 0)
