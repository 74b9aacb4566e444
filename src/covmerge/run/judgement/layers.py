"""Norms of the updates of a layer, and their cosines with the base."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, cast

from covmerge.base.types import Json, Role
from covmerge.files.tensors.names import layer_name
from covmerge.maths.measures.sums import cosine_with_base
from covmerge.plan.planning.types import Plan

# Names of layers: the number of the block, and the layer in the block.


def block_of(name: str) -> int | None:
    """Return the number of the block that a tensor belongs to; None if it is outside all blocks.

    Example:
        >>> block_of("model.layers.11.mlp.up_proj.weight"), block_of("lm_head.weight")
        (11, None)
    """
    found = layer_name(name)
    return found and found.index


def kind_of(name: str) -> str:
    """Return a layer's name without its block and `.weight`, the same in every block.

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
    """Return numbers as text, with consecutive numbers joined to ranges.

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


TABLES = (Role.EMBEDDING, Role.OUTPUT)


@dataclass(frozen=True)
class LayerSums:
    """Sums over the elements of one matrix in all experts, or of a tensor that holds no matrix.

    Example:
        >>> layer = LayerSums("fc", "fc", True, base=4.0, squares={"a": 4.0}, along={"a": -4.0})
        >>> layer.relative("a"), layer.cosine("a")
        (1.0, 0.0)
    """

    tensor: str  # its name in the base
    name: str  # the same, with the index of the matrix if the tensor holds several
    is_matrix: bool  # whether this is the matrix of a layer that has inputs
    base: float  # ‖W_0‖²
    squares: Mapping[str, float]  # ‖Δ_t‖² by expert
    along: Mapping[str, float]  # ⟨Δ_t, W_0⟩ by expert, for experts whose weights were read
    is_table: bool = False  # whether the rows belong to tokens: an embedding, or an output head

    def norm(self, expert: str) -> float:
        """Return ‖Δ_t‖; 0 for an expert that has no part in the layer."""
        return sqrt(max(0.0, self.squares.get(expert, 0.0)))

    def relative(self, expert: str) -> float:
        """Return ‖Δ_t‖ / ‖W_0‖; 0 if the base is zero."""
        return self.norm(expert) / sqrt(self.base) if self.base > 0 else 0.0

    def cosine(self, expert: str) -> float | None:
        """Return the cosine between W_t and W_0; None if the base is zero or the weights were not read."""
        if self.base <= 0 or expert not in self.along:
            return None
        return cosine_with_base(self.base, self.along[expert], self.squares[expert])


def layers_of(plan: Plan, done: Sequence[Mapping[str, Json]]) -> Iterator[LayerSums]:
    """Yield the sums of each merged tensor, added over the items of a finished run."""
    parts: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for item, facts in zip(plan.items, done, strict=True):
        if "updates" in facts:
            parts[item.tensor.key].append(cast("Mapping[str, Any]", facts))
    for tensor in plan.tensors:
        found = parts[tensor.name]
        if found:
            yield LayerSums(
                tensor.name,
                tensor.name,
                tensor.matrices is not None,
                sum(part["base"] for part in found),
                _added([part["updates"] for part in found]),
                _added([part["along"] for part in found]),
                tensor.info.role in TABLES,
            )


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {expert: sum(part[expert] for part in parts) for expert in parts[0]}
