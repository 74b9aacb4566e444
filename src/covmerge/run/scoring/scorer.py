"""What a scorer is, and how one is named."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.run.scoring.values import Scores, scores_of


@runtime_checkable
class Scorer(Protocol):
    """Says how good a model is."""

    @property
    def name(self) -> str:
        """What people call it: the command, or a name with its tasks."""
        ...

    @property
    def key(self) -> str | None:
        """What a score depends on beside the model; None: nobody knows, and no score is saved."""
        ...

    def check(self) -> None:
        """Refuse, before anything is merged, what cannot be run.

        Raises:
            InputError: a program, a package or a file is missing.
        """
        ...

    def score(self, model: Path) -> Scores:
        """Score a model.

        Args:
            model: its folder.

        Raises:
            CovmergeError: it failed; the message says how.
        """
        ...


# What a caller may pass: a command, a name, an object, or a function of a folder.
AnyScorer = str | Scorer | Callable[[Path], Any]


@dataclass(frozen=True)
class Named:
    """A scorer that has a name.

    Attributes:
        module: of this folder, whose `open_scorer` makes it of what follows the name.
        package: that it needs.
        install: how that is installed.
        example: of what follows the name.
    """

    module: str
    package: str
    install: str
    example: str


NAMED: Mapping[str, Named] = {
    "lm-eval": Named("lm_eval", "lm_eval", '"lm-eval[hf]"', "arc_easy,gsm8k"),
    "sentence-transformers": Named(
        "sentences", "sentence_transformers", "sentence-transformers", "sts.csv"
    ),
    "transformers": Named("texts", "transformers", "transformers", "test.csv"),
}


def scorer_of(given: AnyScorer) -> Scorer:
    """Return the scorer that a caller named.

    Raises:
        InputError: no such name, or a command without `{model}`.
    """
    if isinstance(given, str):
        name, colon, arguments = given.partition(":")
        if colon and name in NAMED:
            return _named(name, arguments)
        from covmerge.run.scoring.command import Command

        return Command(given, [f"{name}:{named.example}" for name, named in NAMED.items()])
    return given if isinstance(given, Scorer) else _Function(given)


def _named(name: str, arguments: str) -> Scorer:
    named = NAMED[name]
    if importlib.util.find_spec(named.package) is None:
        raise InputError(f"{Hint('score')} {name}: needs a package: pip install {named.install}")
    wanted = [part.strip() for part in arguments.split(",") if part.strip()]
    if not wanted:
        raise InputError(
            f"{Hint('score')} {name}: does not say what to score on: write {name}:{named.example}"
        )
    return import_module(f"covmerge.run.scoring.{named.module}").open_scorer(wanted)


class _Function:
    """A caller's function of a folder; no score of it is saved, as nobody knows what it depends on."""

    key = None

    def __init__(self, function: Callable[[Path], Any]) -> None:
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = function

    def check(self) -> None:
        if not callable(self._function):
            raise InputError(
                f"score: {self._function!r:.200} is no scorer: pass a command with {{model}} in it, or a "
                "function of a folder"
            )

    def score(self, model: Path) -> Scores:
        return scores_of(self._function(model), f"score: {self.name}")
