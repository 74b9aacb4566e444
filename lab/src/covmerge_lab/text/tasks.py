"""The tasks: which corpus, how much of it, split so that nothing leaks into the test."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from covmerge_lab import splits
from covmerge_lab.text import corpora, further
from covmerge_lab.text.corpora import Example, Reader


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
    TaskSpec("speech", "part of speech a definition is of", further.parts_of_speech, 5000, 1600),
    TaskSpec("stress", "stressed syllable of three", further.stresses, 6000, 3000),
    TaskSpec("countries", "country of an airport", further.countries, 5000, 800),
    TaskSpec("modules", "package of a Python function", further.modules, 3000, 500),
    TaskSpec("forms", "inflected form of a word", further.forms, 6000, 1200),
    TaskSpec("characters", "category of a character by its name", further.characters, 4000, 600),
    TaskSpec("eras", "when a sentence was said to Congress", further.eras, 4000, 1500),
    TaskSpec("topics", "field of knowledge of a definition", further.topics, 3000, 500),
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
    parts = splits.split(
        spec.read(cache), lambda e: e.text.casefold(), spec.per_label, spec.train_size
    )

    def columns(part: list[Example]) -> Split:
        return Split(tuple(e.text for e in part), tuple(parts.labels.index(e.label) for e in part))

    return Task(
        spec.name,
        spec.about,
        parts.labels,
        columns(parts.train),
        columns(parts.validation),
        columns(parts.test),
    )
