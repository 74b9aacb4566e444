"""The metrics of GLUE."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def accuracy(predicted: Numbers, true: Numbers) -> float:
    """Share of equal entries."""
    return float((predicted == true).mean())


def f1(predicted: Numbers, true: Numbers) -> float:
    """Harmonic mean of precision and recall of class 1; 0 where both are undefined."""
    hits = float(((predicted == 1) & (true == 1)).sum())
    named = float((predicted == 1).sum() + (true == 1).sum())
    return 2 * hits / named if named else 0.0


def matthews(predicted: Numbers, true: Numbers) -> float:
    """Matthews correlation, of any number of classes; 0 where one side is constant."""
    classes = np.union1d(predicted, true)
    return _pearson_rows(predicted[None] == classes[:, None], true[None] == classes[:, None])


def pearson(predicted: Numbers, true: Numbers) -> float:
    """Pearson correlation; 0 where one side is constant."""
    return _pearson_rows(predicted[None], true[None])


def spearman(predicted: Numbers, true: Numbers) -> float:
    """Pearson correlation of the ranks; ties share their mean rank."""
    return pearson(_ranks(predicted), _ranks(true))


def _pearson_rows(first: NDArray[np.generic], second: NDArray[np.generic]) -> float:
    x, y = (side.astype(np.float64) for side in (first, second))
    x, y = (side - side.mean(axis=1, keepdims=True) for side in (x, y))
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def _ranks(values: Numbers) -> Numbers:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


METRICS: Mapping[str, Callable[[Numbers, Numbers], float]] = {
    "accuracy": accuracy,
    "matthews": matthews,
    "accuracy_f1": lambda p, t: (accuracy(p, t) + f1(p, t)) / 2,
    "pearson_spearman": lambda p, t: (pearson(p, t) + spearman(p, t)) / 2,
}
