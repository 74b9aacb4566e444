"""Intervals by the paired bootstrap over examples: every model meets the same resamples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
LEVEL = 0.95
_GROUPS = 8000  # that are drawn: 128 MB; of more examples an interval hardly depends on it

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
        """Whether it leaves 0 out."""
        return self.low > 0 or self.high < 0


class Resamples:
    """Draws of each task's test examples.

    The statistic is the mean over tasks of the mean over examples and training seeds. Examples are
    drawn, seeds are not: an interval says how far the result depends on the examples.

    Args:
        sizes: test examples of each task.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        draw = np.random.default_rng(0)
        self._tasks = {task: _Draws(draw, size) for task, size in sizes.items()}

    def mean(self, scores: OfSeeds) -> Interval:
        """Return the mean of a model's scores.

        Args:
            scores: by task, for each seed the score of every example.
        """
        return _interval(self._draws(scores), _mean(scores))

    def difference(self, scores: OfSeeds, other: OfSeeds) -> Interval:
        """Return the mean of a model's scores less that of another's."""
        return _interval(self._draws(scores) - self._draws(other), _mean(scores) - _mean(other))

    def _draws(self, scores: OfSeeds) -> Array:
        of_task = [
            self._tasks[task].means(np.asarray(of_seeds, dtype=np.float64).mean(axis=0))
            for task, of_seeds in scores.items()
        ]
        return np.mean(of_task, axis=0)


class _Draws:
    """How often each draw has each example of one task; of many examples, each group of neighbours."""

    def __init__(self, draw: np.random.Generator, size: int) -> None:
        groups = min(size, _GROUPS)
        self._starts = np.arange(groups) * size // groups
        self._counts = np.diff(np.append(self._starts, size))
        self._drawn = draw.multinomial(groups, np.full(groups, 1 / groups), size=DRAWS)

    def means(self, examples: Array) -> Array:
        """The mean over the examples of every draw."""
        sums = np.add.reduceat(examples, self._starts)
        return (self._drawn @ sums) / (self._drawn @ self._counts)


def _mean(scores: OfSeeds) -> float:
    return float(np.mean([np.mean(of_seeds) for of_seeds in scores.values()]))


def _interval(draws: Array, mean: float) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high))
