"""The tasks: which corpus, how much of it, split so that nothing leaks into the test."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from covmerge.evaluation.text import corpora
from covmerge.evaluation.text.corpora import Example, Reader

VALIDATION_SIZE = 100
TEST_SIZE = 400
SEED = 7


@dataclass(frozen=True)
class Split:
    """Texts and the index of each one's label."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def first(self, size: int) -> Split:
        """Return the first texts."""
        return Split(self.texts[:size], self.labels[:size])


@dataclass(frozen=True)
class Task:
    """A text-classification task with its data."""

    name: str
    about: str
    labels: tuple[str, ...]
    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class TaskSpec:
    """What a task is made from.

    Attributes:
        train_size: most training examples kept.
        per_label: most examples of one label kept, so that no label swamps the others.
    """

    name: str
    about: str
    read: Reader
    train_size: int
    per_label: int


SPECS = (
    TaskSpec("language", "language of a message", corpora.interface_messages, 4000, 600),
    TaskSpec("medicine", "ICD-10 chapter of a diagnosis", corpora.diagnoses, 6000, 600),
    TaskSpec("code", "verb in a Python function's name", corpora.functions, 3000, 500),
    TaskSpec("sentiment", "sign of an opinion word", corpora.opinion_words, 5000, 4000),
    TaskSpec("places", "part of the world of an airport", corpora.airports, 5000, 1200),
    TaskSpec("syllables", "syllables of a word", corpora.pronunciations, 8000, 3000),
    TaskSpec("definitions", "kind of thing a definition is of", corpora.definitions, 8000, 1200),
    TaskSpec("actions", "kind of action in a sentence", corpora.actions, 1500, 400),
)


def save(task: Task, path: Path) -> None:
    """Write a task as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(task), ensure_ascii=False) + "\n", encoding="utf-8")


@lru_cache
def load(path: Path) -> Task:
    """Read a task that was saved."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    parts = {
        part: Split(tuple(stored[part]["texts"]), tuple(stored[part]["labels"]))
        for part in ("train", "validation", "test")
    }
    return Task(stored["name"], stored["about"], tuple(stored["labels"]), **parts)


def build(spec: TaskSpec, cache: Path) -> Task:
    """Read, clean and split one corpus; the same Python and packages give the same task."""
    shuffled = _unambiguous(spec.read(cache))
    random.Random(SEED).shuffle(shuffled)
    examples = _at_most(spec.per_label, shuffled)
    labels = tuple(sorted({example.label for example in examples}))
    index = {label: i for i, label in enumerate(labels)}
    test, rest = _take_groups(TEST_SIZE, examples)
    validation, rest = _take_groups(VALIDATION_SIZE, rest)

    def split(part: list[Example]) -> Split:
        return Split(tuple(e.text for e in part), tuple(index[e.label] for e in part))

    train = split(rest[: spec.train_size])
    return Task(spec.name, spec.about, labels, train, split(validation), split(test))


def _unambiguous(examples: Iterable[Example]) -> list[Example]:
    """Keep each text once, and none that carries two labels."""
    by_text: dict[str, dict[str, Example]] = defaultdict(dict)
    for example in examples:
        by_text[example.text.casefold()].setdefault(example.label, example)
    return [next(iter(found.values())) for found in by_text.values() if len(found) == 1]


def _at_most(per_label: int, examples: list[Example]) -> list[Example]:
    seen: Counter[str] = Counter()
    kept: list[Example] = []
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
