"""What a study is: a question put to the experts of a suite, answered in numbers and pictures."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from covmerge import __version__
from covmerge.errors import InputError, did_you_mean
from covmerge_lab import figures
from covmerge_lab.bench import Bench, machine
from covmerge_lab.suite import Kind, Suite, Variant


@dataclass(frozen=True)
class Findings:
    """What a study found.

    Attributes:
        numbers: all of it, as plain JSON.
        text: tables and what can be read from them, in Markdown.
        pictures: matplotlib figures, by file name without its suffix.
    """

    numbers: Mapping[str, Any]
    text: str
    pictures: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Study(ABC):
    """A question of the papers.

    Args:
        only: parts to which it is limited; empty for all.

    Attributes:
        name: what the command line calls it.
        about: the question, and where the papers put it.
        kinds: the experts that it is a question of.
        parts: what it goes through one by one, by name; empty where it is answered as a whole.

    Raises:
        InputError: it has no such part.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]] = ("full", "lora")
    parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, only: Sequence[str] = ()) -> None:
        for part in only:
            if not self.parts:
                raise InputError(f"study '{self.name}' has no parts: leave out --only '{part}'")
            if part not in self.parts:
                raise InputError(
                    f"study '{self.name}' has no part '{part}'.{did_you_mean(part, self.parts)}"
                )
        self.only = tuple(dict.fromkeys(only))

    def parts_of(self, kind: Kind) -> Sequence[str]:
        """Return the parts that are a question of one kind of experts."""
        return self.parts

    def check(self, suite: Suite, kinds: Sequence[Kind]) -> None:
        """Refuse a suite or experts that it cannot run on, before anything is fetched.

        Raises:
            InputError: it cannot.
        """
        found = {part for kind in kinds for part in self.parts_of(kind)}
        for part in self.only:
            if part not in found:
                raise InputError(
                    f"study '{self.name}': '{part}' is of other experts than {', '.join(kinds)}: pass the "
                    f"other --kind, or leave out --only '{part}'"
                )

    @abstractmethod
    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        """Answer it on a suite's experts, trained in each of these ways."""


def save(study: Study, bench: Bench, found: Findings, out: Path, command: str) -> None:
    """Write `results.json`, `README.md` and the pictures."""
    out.mkdir(parents=True, exist_ok=True)
    shown = figures.save(found.pictures, out)
    content = {
        "study": study.name,
        "suite": bench.suite.name,
        "accuracy": bench.suite.accuracy,
        "quick": bench.suite.quick,
        "command": command,
        "machine": machine(),
        "seconds": bench.seconds,
        **found.numbers,
    }
    (out / "results.json").write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (out / "README.md").write_text(
        f"# Study `{study.name}` on the suite `{bench.suite.name}`\n\n{study.about}\n\n"
        f"Made by `{command}` with covmerge {__version__}. Accuracy is {bench.suite.accuracy}.\n\n"
        f"{found.text}\n\n{shown}\n",
        encoding="utf-8",
    )
