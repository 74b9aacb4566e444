"""The tasks: which corpus, how it is asked, split so that nothing leaks into the test.

The parts of a task are files of JSON lines, `{"prompt": ..., "answer": ...}`, which lm-eval reads too.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from covmerge_lab.llm import corpora
from covmerge_lab.llm.corpora import SEED, Example, Reader
from covmerge_lab.suite import Part

SIZES: dict[Part, int] = {
    "test": 100,
    "validation": 50,
    "train": 1600,
}  # in the order they are taken
PER_GROUP = 2  # most that are asked of one group when a model is tested


class Question(NamedTuple):
    """What the model reads, and what it is to write before the next line begins."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class TaskSpec:
    """What a task is made from.

    Attributes:
        given: what the text is called in the prompt. It does not begin with the text itself, since models
            use the first token of all to attend to nothing, and its meaning is lost.
        asked: what the answer is called.
    """

    name: str
    about: str
    read: Reader
    given: str
    asked: str

    def prompt(self, text: str) -> str:
        """Return what the model reads."""
        return f"{self.given}: {text}\n{self.asked}:"


SPECS = (
    TaskSpec("arithmetic", "generated word problems", corpora.word_problems, "Problem", "Answer"),
    TaskSpec("extraction", "code and town of an airport", corpora.airports, "Notice", "JSON"),
    TaskSpec("translation", "dates and times", corpora.spanish_times, "English", "Spanish"),
    TaskSpec("calls", "a call of a Python function", corpora.calls, "Code", "Call"),
    TaskSpec("verbs", "forms of an English verb", corpora.verbs, "Verb", "Forms"),
)


def build(spec: TaskSpec, cache: Path) -> dict[Part, list[Question]]:
    """Read, clean and split one corpus; the same Python and packages give the same task."""
    groups: dict[str, list[Example]] = defaultdict(list)
    for example in _unambiguous(spec.read(cache)):
        groups[example.group].append(example)
    names = sorted(groups)
    draw = random.Random(SEED)
    draw.shuffle(names)
    parts: dict[Part, list[Question]] = {}
    for part, size in SIZES.items():
        taken: list[Example] = []
        while len(taken) < size and names:
            group = groups[names.pop()]
            taken += group if part == "train" else group[:PER_GROUP]
        draw.shuffle(taken)
        parts[part] = [Question(spec.prompt(e.text), e.answer) for e in taken[:size]]
    return parts


def _unambiguous(examples: Iterable[Example]) -> list[Example]:
    """Keep each text once, and none that has two answers."""
    by_text: dict[str, dict[str, Example]] = defaultdict(dict)
    for example in examples:
        by_text[example.text].setdefault(example.answer, example)
    return [next(iter(found.values())) for found in by_text.values() if len(found) == 1]


def save(questions: list[Question], path: Path) -> None:
    """Write a part of a task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(question._asdict()) for question in questions)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def load(path: Path) -> list[Question]:
    """Read a part of a task."""
    return [Question(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
