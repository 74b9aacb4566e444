"""Scores: check what a scorer returns, and compute intervals over the examples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from numbers import Real
from statistics import fmean
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.text import printable
from covmerge.base.types import Json

ONE_TASK = "score"  # the task of a scorer that returns one number
_MOST_TASKS, _MOST_EXAMPLES = 10_000, 10_000_000
_FORMS = "a number, or {task: number}, or {task: list of one number for each example}, as JSON if printed"


@dataclass(frozen=True)
class Score:
    """The score of a model on one task.

    Attributes:
        value: the score, higher is better; NaN if the score, or that of an example, is not finite.
        examples: one score per example, whose mean is the value; None if only the value is known.
    """

    value: float
    examples: tuple[float, ...] | None = None

    def as_json(self) -> Json:
        """Return the JSON that `score_of` reads."""
        if self.examples is not None:
            return list(self.examples)
        return self.value if isfinite(self.value) else None


Scores = Mapping[str, Score]


def scores_of(returned: object, source: str) -> dict[str, Score]:
    """Check the value that a scorer returned, and return scores by task; `source` names the scorer.

    The value is a number, or a mapping from task to a number or a sequence of numbers, one per example.
    Arrays and tensors count as sequences.

    Raises:
        InputError: the value has none of these forms.

    Example:
        >>> scores_of({"sts": [1, 0, 1, 1]}, "it")["sts"].value
        0.75
    """
    if not isinstance(returned, Mapping):
        returned = {ONE_TASK: returned}
    tasks = cast("Mapping[object, object]", returned)
    if not tasks or len(tasks) > _MOST_TASKS:
        raise InputError(f"{source} gave {len(tasks)} tasks: have it give {_FORMS}")
    return {_task(name, source): _score(value, name, source) for name, value in tasks.items()}


def printed_scores(text: str, source: str) -> dict[str, Score]:
    """Read scores from a command's output: all of it, or its last non-empty line, is JSON.

    Raises:
        InputError: neither is JSON, or the JSON holds no valid scores.
    """
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    for part in (text, last):
        try:
            found: Any = json.loads(part)
        except (ValueError, RecursionError):
            continue
        return scores_of(found, source)
    shown = printable(last.strip())[:200]
    raise InputError(
        f"{source} printed no score: its last line is {shown!r}. Have it print {_FORMS}"
    )


def score_of(stored: Json) -> Score:
    """Return a score from the JSON of `Score.as_json`."""
    return Score(nan) if stored is None else _score(stored, ONE_TASK, "scores.json")


def _task(name: object, source: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not printable(name).isprintable():
        raise InputError(f"{source} names a task {name!r:.200}: name tasks by short texts")
    return printable(name)


def _score(value: object, task: object, source: str) -> Score:
    if isinstance(value, np.ndarray | Tensor):
        value = cast("object", cast("Any", value).tolist())
    if isinstance(value, Real):  # a bool too: right or wrong
        return Score(_finite(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        given = cast("Sequence[object]", value)
        if 0 < len(given) <= _MOST_EXAMPLES and all(isinstance(one, Real) for one in given):
            examples = tuple(map(_finite, given))
            try:
                mean = fmean(examples)
            except OverflowError:
                mean = nan
            return Score(mean, examples if isfinite(mean) else None)
        what = f"a list of {len(given)} that are not all numbers" if given else "an empty list"
    else:
        what = repr(value)[:200]
    raise InputError(f"{source} gave {what} for task '{task}': have it give {_FORMS}")


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:  # the integer is too large
        return nan
    return number if isfinite(number) else nan


# Intervals by the paired bootstrap over examples: all models use the same resamples.

DRAWS = 2000
LEVEL = 0.95
_GROUPS = 8000  # most groups of examples that are drawn (128 MB); more would hardly help

Array = NDArray[np.float64]
OfSeeds = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Interval:
    """A mean and its interval, in the unit of the scores."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


class Resamples:
    """Bootstrap resamples of each task's test examples.

    The statistic is the mean over tasks of the mean over examples and training seeds. Only examples are
    resampled, not seeds: an interval shows how much the result depends on the examples.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        draw = np.random.default_rng(0)
        self._tasks = {task: _Draws(draw, size) for task, size in sizes.items()}

    def mean(self, scores: OfSeeds) -> Interval:
        """Return the mean of scores, with its interval; by task, those of all examples for each seed."""
        return _interval(self._draws(scores), _mean_over_seeds(scores))

    def difference(self, scores: OfSeeds, other: OfSeeds) -> Interval:
        """Return the mean of a model's scores minus the mean of another's, with its interval."""
        return _interval(
            self._draws(scores) - self._draws(other),
            _mean_over_seeds(scores) - _mean_over_seeds(other),
        )

    def _draws(self, scores: OfSeeds) -> Array:
        of_task = [
            self._tasks[task].means(np.asarray(of_seeds, dtype=np.float64).mean(axis=0))
            for task, of_seeds in scores.items()
        ]
        return np.mean(of_task, axis=0)


class _Draws:
    """Counts of one task's examples in each resample.

    With more than 8000 examples, groups of neighbouring examples are drawn instead of single ones.
    """

    def __init__(self, draw: np.random.Generator, size: int) -> None:
        groups = min(size, _GROUPS)
        self._starts = np.arange(groups) * size // groups
        self._counts = np.diff(np.append(self._starts, size))
        self._drawn = draw.multinomial(groups, np.full(groups, 1 / groups), size=DRAWS)

    def means(self, examples: Array) -> Array:
        """Return the mean over the examples of each resample."""
        sums = np.add.reduceat(examples, self._starts)
        return (self._drawn @ sums) / (self._drawn @ self._counts)


def _mean_over_seeds(scores: OfSeeds) -> float:
    return float(np.mean([np.mean(of_seeds) for of_seeds in scores.values()]))


def _interval(draws: Array, mean: float) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high))
