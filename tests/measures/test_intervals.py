import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covmerge.run.scoring.values import Interval, Resamples


def drawn(seed, size, chance):
    return [float(hit) for hit in np.random.default_rng(seed).random(size) < chance]


def test_the_interval_has_the_width_of_the_binomial_one():
    scores = {"a": [drawn(0, 400, 0.7)], "b": [drawn(1, 400, 0.4)]}
    found = Resamples({"a": 400, "b": 400}).mean(scores)
    means = [np.mean(scores[task][0]) for task in scores]
    assert found.mean == pytest.approx(np.mean(means))
    deviation = np.sqrt(sum(mean * (1 - mean) / 400 for mean in means)) / 2
    assert found.high - found.low == pytest.approx(2 * 1.96 * deviation, rel=0.1)


def test_examples_are_paired():
    """Two models that differ on one example in a hundred are told apart by their difference alone."""
    one = drawn(0, 1000, 0.5)
    other = [0.0 if place % 100 == 0 else score for place, score in enumerate(one)]
    resamples = Resamples({"task": 1000})
    apart = resamples.difference({"task": [one]}, {"task": [other]})
    assert apart.clear and 0 < apart.low < apart.mean < apart.high < 0.02
    first, second = resamples.mean({"task": [one]}), resamples.mean({"task": [other]})
    assert first.low < second.high


def test_seeds_of_one_model_count_as_their_mean():
    resamples = Resamples({"task": 50})
    one, two = drawn(0, 50, 0.5), drawn(1, 50, 0.5)
    both = resamples.mean({"task": [one, two]})
    assert both.mean == pytest.approx((np.mean(one) + np.mean(two)) / 2)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_a_model_is_no_better_than_itself(sizes):
    tasks = {str(place): size for place, size in enumerate(sizes)}
    scores = {task: [drawn(size, size, 0.5)] for task, size in tasks.items()}
    found = Resamples(tasks).difference(scores, scores)
    assert found == Interval(0.0, 0.0, 0.0) and not found.clear
