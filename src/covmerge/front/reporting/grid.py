"""The order of layers in pictures: a panel for each kind of layer, with a column for each block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from covmerge.run.judgement.layers import block_of, kind_of

_Of = TypeVar("_Of")
# The experts of a mixture are too many for one panel each: each cell is their mean.
_OF_MIXTURE = re.compile(r"\bexperts\.\d+\b")
_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")
SINGLE = "single layers"
_TOGETHER = 16  # layers in one panel


@dataclass(frozen=True)
class Panel(Generic[_Of]):
    """A panel for layers of one kind."""

    label: str
    # the layers of each block, by its number; layers that occur once, by name
    columns: Mapping[str, tuple[_Of, ...]]
    numbered: bool = True  # whether the columns are blocks


def panels(layers: Iterable[tuple[str, _Of]]) -> list[Panel[_Of]]:
    """Sort layers into panels, in the order of the first layer of each kind.

    Example:
        >>> names = ["h.0.fc.weight", "h.1.fc.weight", "pooler.weight"]
        >>> for panel in panels((name, name) for name in names):
        ...     print(panel.label, panel.columns)
        fc {'0': ('h.0.fc.weight',), '1': ('h.1.fc.weight',)}
        pooler {'pooler': ('pooler.weight',)}
    """
    found: dict[tuple[str, str], dict[str, list[_Of]]] = {}
    single: dict[str, list[_Of]] = {}
    for name, layer in layers:
        block, kind = block_of(name), _kind(name)
        if block is None:
            single.setdefault(kind, []).append(layer)
            continue
        key = (_NUMBER.split(name, maxsplit=1)[0], kind)
        found.setdefault(key, {}).setdefault(str(block), []).append(layer)
    for (prefix, kind), columns in list(found.items()):
        if len(columns) == 1:
            ((block, members),) = columns.items()
            single[".".join(part for part in (prefix, block, kind) if part)] = members
            del found[prefix, kind]
    labels = _labels(list(found))
    listed = [
        Panel(labels[key], {block: tuple(column) for block, column in columns.items()})
        for key, columns in found.items()
    ]
    names = list(single)
    for start in range(0, len(names), _TOGETHER):
        columns = {name: tuple(single[name]) for name in names[start : start + _TOGETHER]}
        label = next(iter(columns)) if len(columns) == 1 else SINGLE
        listed.append(Panel(label, columns, numbered=False))
    return listed


def _kind(name: str) -> str:
    kind = kind_of(name).replace(".weight[", "[")
    return _OF_MIXTURE.sub("experts.*", kind)


def _labels(keys: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return a label for each kind; kinds that occur in two towers have the towers' names."""
    towers = _differing(sorted({prefix for prefix, _ in keys}))
    kinds = [kind for _, kind in keys]
    return {
        (prefix, kind): kind if kinds.count(kind) == 1 else f"{towers[prefix]}: {kind}"
        for prefix, kind in keys
    }


def _differing(prefixes: list[str]) -> dict[str, str]:
    """Return the prefixes without the parts that all of them begin or end with."""
    split = [prefix.split(".") for prefix in prefixes]
    shortest = min((len(parts) for parts in split), default=0)
    head = tail = 0
    while head < shortest and len({parts[head] for parts in split}) == 1:
        head += 1
    while tail < shortest - head and len({parts[-1 - tail] for parts in split}) == 1:
        tail += 1
    return {
        ".".join(parts): ".".join(parts[head : len(parts) - tail]) or ".".join(parts)
        for parts in split
    }
