"""From labelled examples to training, validation and test parts that share nothing."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

VALIDATION_SIZE = 100
TEST_SIZE = 400
SEED = 7


class Labelled(Protocol):
    """An example of a task; examples of one group are alike."""

    @property
    def label(self) -> str: ...

    @property
    def group(self) -> str: ...


Example = TypeVar("Example", bound=Labelled)


@dataclass(frozen=True)
class Parts(Generic[Example]):
    """The examples of a task, no group of which is in two of them, and all labels there are."""

    labels: tuple[str, ...]
    train: list[Example]
    validation: list[Example]
    test: list[Example]


def split(
    examples: Iterable[Example],
    identity: Callable[[Example], Hashable],
    per_label: int,
    train_size: int,
) -> Parts[Example]:
    """Clean and split examples; the same examples give the same parts.

    Args:
        examples: all there are.
        identity: the same for two that are the same, whatever their labels say.
        per_label: most examples of one label kept, so that no label swamps the others.
        train_size: most training examples kept.
    """
    shuffled = _unambiguous(examples, identity)
    random.Random(SEED).shuffle(shuffled)
    kept = _at_most(per_label, shuffled)
    test, rest = _take_groups(TEST_SIZE, kept)
    validation, rest = _take_groups(VALIDATION_SIZE, rest)
    labels = tuple(sorted({example.label for example in kept}))
    return Parts(labels, rest[:train_size], validation, test)


def _unambiguous(
    examples: Iterable[Example], identity: Callable[[Example], Hashable]
) -> list[Example]:
    """Keep each example once, and none that carries two labels."""
    found: dict[Hashable, dict[str, Example]] = defaultdict(dict)
    for example in examples:
        found[identity(example)].setdefault(example.label, example)
    return [next(iter(same.values())) for same in found.values() if len(same) == 1]


def _at_most(per_label: int, examples: list[Example]) -> list[Example]:
    kept: list[Example] = []
    seen: dict[str, int] = defaultdict(int)
    for example in examples:
        seen[example.label] += 1
        if seen[example.label] <= per_label:
            kept.append(example)
    return kept


def _take_groups(size: int, examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """Take whole groups until they hold `size` examples; return those, and every other group."""
    groups: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        groups[example.group].append(example)
    names = sorted(groups)
    random.Random(SEED).shuffle(names)
    taken: list[Example] = []
    while len(taken) < size:
        taken += groups.pop(names.pop())
    return taken[:size], [example for example in examples if example.group in groups]
