"""Intervals by the paired bootstrap over test examples: every model meets the same resamples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from covmerge_lab.suite import Scores

DRAWS = 2000
LEVEL = 0.95

Array = NDArray[np.float64]


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
        self._weights: dict[str, Array] = {
            task: draw.multinomial(size, np.full(size, 1 / size), size=DRAWS) / size
            for task, size in sizes.items()
        }

    def mean(self, scores: Mapping[str, Sequence[Scores]]) -> Interval:
        """Return the mean of a model's scores.

        Args:
            scores: by task, for each seed the score of every example.
        """
        return _interval(self._draws(scores), _mean(scores))

    def difference(
        self, scores: Mapping[str, Sequence[Scores]], other: Mapping[str, Sequence[Scores]]
    ) -> Interval:
        """Return the mean of a model's scores less that of another's."""
        return _interval(self._draws(scores) - self._draws(other), _mean(scores) - _mean(other))

    def _draws(self, scores: Mapping[str, Sequence[Scores]]) -> Array:
        of_task = [
            self._weights[task] @ np.asarray(of_seeds, dtype=np.float64).mean(axis=0)
            for task, of_seeds in scores.items()
        ]
        return np.mean(of_task, axis=0)


def _mean(scores: Mapping[str, Sequence[Scores]]) -> float:
    return float(np.mean([np.mean(of_seeds) for of_seeds in scores.values()]))


def _interval(draws: Array, mean: float) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high))
