import numpy as np
import pytest

from covmerge_lab.reproduce import metrics

PREDICTED, TRUE = np.array([1.0, 0, 1, 1, 0, 0]), np.array([1.0, 0, 0, 1, 1, 0])


def test_classification():
    assert metrics.accuracy(PREDICTED, TRUE) == pytest.approx(4 / 6)
    assert metrics.f1(PREDICTED, TRUE) == pytest.approx(2 * 2 / (3 + 3))
    # (TP TN - FP FN) / sqrt(...) with 2, 2, 1, 1.
    assert metrics.matthews(PREDICTED, TRUE) == pytest.approx((2 * 2 - 1) / 9)


def test_matthews_of_three_classes_is_the_multiclass_one():
    predicted, true = np.array([0.0, 1, 2, 2, 0]), np.array([0.0, 1, 1, 2, 2])
    confusion = np.array([[1, 0, 0], [0, 1, 1], [1, 0, 1]])
    hits, count = np.trace(confusion), confusion.sum()
    named, real = confusion.sum(axis=0), confusion.sum(axis=1)
    above = hits * count - named @ real
    below = np.sqrt((count**2 - named @ named) * (count**2 - real @ real))
    assert metrics.matthews(predicted, true) == pytest.approx(above / below)


def test_correlations():
    x, y = np.array([1.0, 2, 3, 4]), np.array([1.0, 4, 9, 16])
    assert metrics.pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert metrics.spearman(x, y) == pytest.approx(1)
    # Ties share their mean rank: 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    tied = np.array([1.0, 2, 2, 3])
    assert metrics.spearman(tied, x) == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], x)[0, 1])


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_a_constant_prediction_is_no_error(metric):
    assert metrics.METRICS[metric](np.zeros(4), np.array([0.0, 1, 1, 0])) in (0, 0.25, 0.5)
