"""What the base of the suite `gpt2` reads: English, and questions in the form of the tasks', but others.

They are of other words, other languages, sums without a story and made-up records. Sums it sees of all
small numbers, those of the tests' problems too, as language models have; nothing else of a test is among
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from string import ascii_uppercase
from typing import NamedTuple

from covmerge_lab.llm import corpora, tasks
from covmerge_lab.packages import fetch
from covmerge_lab.text.further import ADDRESSES, inflections

LANGUAGES = {"fr": "French", "de": "German", "it": "Italian", "nl": "Dutch"}
ENGLISH = 0.25  # of the lines
PIECE = 128  # characters of English in a line
SEED = 77  # of the dates, which are others than the task's

_OPERATIONS = {
    "+": (int.__add__, ("+", "and", "plus")),
    "-": (int.__sub__, ("-", "less", "without")),
    "*": (int.__mul__, ("*", "times", "rows of")),
}


class Asked(NamedTuple):
    """A question: what the text is called, the text, what is wanted, and the answer."""

    given: str
    text: str
    wanted: str
    answer: str


class Lines:
    """English and questions in a random order, without end, always the same for a seed.

    Args:
        cache: the folder of fetched packages.
        seed: of what is drawn.
    """

    def __init__(self, cache: Path, seed: int) -> None:
        self._seed = seed
        self._draw = Random(seed)
        self._english = _english(cache)
        self._forms = list(_forms(cache))
        self._words = [each.text for each in self._forms if each.given == "Noun"]
        self._dates = list(_dates(cache))

    def __iter__(self) -> Iterator[str]:
        self._draw = Random(self._seed)
        kinds: Sequence[Callable[[], Asked]] = (
            lambda: self._draw.choice(self._forms),
            lambda: self._draw.choice(self._dates),
            *[self._sum] * 4,  # they take longest to learn
            self._field,
            self._as_json,
            self._keys,
            self._turned,
        )
        while True:
            if self._draw.random() < ENGLISH:
                start = self._draw.randrange(len(self._english) - PIECE)
                yield self._english[start : start + PIECE] + "\n"
            else:
                asked = self._draw.choice(kinds)()
                yield f"{asked.given}: {asked.text}\n{asked.wanted}: {asked.answer}\n"

    def _some(self, least: int, most: int) -> list[str]:
        return self._draw.sample(self._words, self._draw.randint(least, most))

    def _sum(self) -> Asked:
        """Return a sum of bare numbers or of things, in signs or in words."""
        sign = self._draw.choice("+-*")
        combine, joints = _OPERATIONS[sign]
        most = 9 if sign == "*" else 20
        large, small = sorted((self._draw.randint(2, most), self._draw.randint(2, most)))[::-1]
        things = self._draw.choice(("", f" {self._draw.choice(self._words)}"))
        text = f"{large}{things} {self._draw.choice(joints)} {small}{things}"
        return Asked("Sum", text, "Result", str(combine(large, small)))

    def _value(self) -> str:
        if self._draw.random() < 0.5:
            return "".join(self._draw.choices(ascii_uppercase, k=self._draw.randint(2, 5)))
        return self._draw.choice(self._words).capitalize()

    def _field(self) -> Asked:
        """Return a record of which one value is asked."""
        names = self._some(2, 4)
        values = {name: self._value() for name in names}
        asked = self._draw.choice(names)
        joint = self._draw.choice((" ", " is ", "=", ": "))
        told = ", ".join(f"{name}{joint}{value}" for name, value in values.items())
        return Asked("Record", told, asked, values[asked])

    def _as_json(self) -> Asked:
        """Return a record of which two values are asked as JSON."""
        names = self._some(2, 4)
        values = {name: self._value() for name in names}
        asked = self._draw.sample(names, 2)
        told = "; ".join(f"{name} {value}" for name, value in values.items())
        answer = json.dumps({name: values[name] for name in asked})
        return Asked("Entry", f"{told} ({' '.join(asked)})", "Object", answer)

    def _keys(self) -> Asked:
        """Return settings whose names are asked."""
        names = self._some(1, 4)
        told = [f"{n}={self._value()}" if self._draw.random() < 0.5 else n for n in names]
        return Asked("Settings", f"[{', '.join(told)}]", "Names", f"[{', '.join(names)}]")

    def _turned(self) -> Asked:
        """Return words that are asked for in another order, or in capitals."""
        words = self._some(2, 4)
        if self._draw.random() < 0.5:
            return Asked("Words", " ".join(words), "Backwards", " ".join(words[::-1]))
        return Asked("Words", " ".join(words), "Capitals", " ".join(words).upper())


def _english(cache: Path) -> str:
    """All addresses but those that perplexity is of."""
    kept_apart = set(corpora.general_text(cache))
    paths = sorted(fetch(ADDRESSES, cache).glob("*.txt"))
    return "\n".join(
        text for text in (p.read_text("utf-8") for p in paths) if text not in kept_apart
    )


def _dates(cache: Path) -> Iterator[Asked]:
    """Dates and times in other languages, but for those that are asked where models are tested."""
    (spec,) = (each for each in tasks.SPECS if each.name == "translation")
    parts = tasks.build(spec, cache)
    tested = {question.prompt for part in ("test", "validation") for question in parts[part]}
    for code, language in LANGUAGES.items():
        for example in corpora.times(cache, code, SEED):
            if spec.prompt(example.text) not in tested:
                yield Asked("English", example.text, language, example.answer)


def _forms(cache: Path) -> Iterator[Asked]:
    """Plurals of nouns, and adjectives compared: of verbs there is a task."""
    for word, kind, *forms in inflections(cache):
        if not (word.isalpha() and word.isascii() and len(word) <= 10 and all(forms)):
            continue
        if kind == "noun" and "/" not in forms[0]:
            yield Asked("Noun", word, "Plural", forms[0])
        elif kind == "adj" and len(forms) == 2 and "/" not in "".join(forms):
            yield Asked("Adjective", word, "Forms", ", ".join(forms))
