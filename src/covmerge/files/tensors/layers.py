"""Layers that follow one another: which one a tensor belongs to, by its name, and how deep that lies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class LayerName:
    """The name of a tensor in one of several layers of a kind, taken apart at its first number.

    Attributes:
        stack: what stands before the number: the same for all layers of the stack.
        index: the number.
        rest: what stands after it: the same in all layers.
    """

    stack: str
    index: int
    rest: str

    def at(self, index: int) -> str:
        """Return the name of the same tensor in another layer."""
        return f"{self.stack}{index}{self.rest}"


def layer_name(name: str) -> LayerName | None:
    """Take a name apart; None outside all layers.

    Example:
        >>> layer_name("model.layers.11.mlp.experts.3.up.weight")
        LayerName(stack='model.layers.', index=11, rest='.mlp.experts.3.up.weight')
    """
    found = _NUMBER.search(name)
    return found and LayerName(name[: found.start(1)], int(found[1]), name[found.end(1) :])


def in_rows_of_blocks(names: Iterable[str]) -> frozenset[str]:
    """The tensors of blocks that stand one behind the other: their numbers begin at 0 and leave none out.

    A number after which others are missing is the place of one layer in a few, a head or a projection,
    as `torch.nn.Sequential` counts what has weights and what has none.

    Example:
        >>> names = ["h.0.fc", "h.1.fc", "classifier.1.weight", "mlp.0.weight", "mlp.2.weight", "norm"]
        >>> sorted(in_rows_of_blocks(names))
        ['h.0.fc', 'h.1.fc']
    """
    found = {name: layer for name in names if (layer := layer_name(name)) is not None}
    numbers: dict[str, set[int]] = {}
    for layer in found.values():
        numbers.setdefault(layer.stack, set()).add(layer.index)
    return frozenset(
        name
        for name, layer in found.items()
        if max(numbers[layer.stack]) + 1 == len(numbers[layer.stack])
    )


def relative_depth(index: int, count: int) -> float:
    """Return t = i/(L − 1) of layer i of L; 1 of the only one."""
    return index / (count - 1) if count > 1 else 1.0


def relative_depths(names: Iterable[str]) -> dict[str, float]:
    """Return how deep each tensor lies in the stack of layers that it belongs to; 0 outside all stacks.

    Example:
        >>> relative_depths(["wte", "h.0.fc", "h.1.fc", "h.2.fc", "ln_f"])
        {'wte': 0.0, 'h.0.fc': 0.0, 'h.1.fc': 0.5, 'h.2.fc': 1.0, 'ln_f': 0.0}
    """
    found = {name: layer_name(name) for name in names}
    counts: dict[str, int] = {}
    for layer in found.values():
        if layer is not None:
            counts[layer.stack] = max(counts.get(layer.stack, 0), layer.index + 1)
    return {
        name: 0.0 if layer is None else relative_depth(layer.index, counts[layer.stack])
        for name, layer in found.items()
    }
