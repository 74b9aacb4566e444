"""Names of layers for people: which block, and which layer of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from covmerge.files.tensors.layers import layer_name


def block_of(name: str) -> int | None:
    """Return the number of the block that a tensor belongs to, None outside all blocks.

    Example:
        >>> block_of("model.layers.11.mlp.up_proj.weight"), block_of("lm_head.weight")
        (11, None)
    """
    found = layer_name(name)
    return found and found.index


def kind_of(name: str) -> str:
    """Return what a layer is called in each block.

    Example:
        >>> kind_of("model.layers.11.mlp.up_proj.weight"), kind_of("model.embed.weight")
        ('mlp.up_proj', 'model.embed')
    """
    found = layer_name(name)
    kind = found.rest.removeprefix(".") if found else name
    return kind.removesuffix(".weight") or name


def by_depth(names: Iterable[str]) -> list[str]:
    """Sort names so that layer 10 comes after layer 9.

    Example:
        >>> by_depth(["h.10.fc", "h.9.fc"])
        ['h.9.fc', 'h.10.fc']
    """
    return sorted(names, key=lambda name: [p.zfill(6) for p in re.split(r"(\d+)", name)])


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers with runs joined.

    Example:
        >>> ranges([0, 1, 2, 5])
        '0–2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
