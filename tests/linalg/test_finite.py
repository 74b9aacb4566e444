"""One NaN or Inf anywhere is found, in every dtype that checkpoints have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.maths.linalg.stored import all_finite

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 200),
    place=st.integers(0, 199),
    planted=st.sampled_from([float("nan"), float("inf"), float("-inf"), None]),
)
def test_one_value_is_enough(dtype, size, place, planted):
    values = torch.linspace(-3, 3, size)
    if planted is not None:
        values[place % size] = planted
    assert all_finite(values.to(dtype)) == (planted is None)


def test_the_largest_numbers_are_finite():
    for dtype in FLOATS:
        largest = torch.finfo(dtype).max
        values = torch.tensor([-largest, largest], dtype=torch.float64).to(dtype)
        assert all_finite(values)
        assert all_finite(values[1:].expand(3))  # their sum is Inf


def test_a_float8_without_infinities_has_nan():
    values = torch.tensor([1.0, float("nan")])
    assert not all_finite(values.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("values", [torch.empty(0, 3), torch.tensor([1, 2]), torch.tensor(True)])
def test_nothing_and_integers_are_finite(values):
    assert all_finite(values)


def test_a_scalar():
    assert all_finite(torch.tensor(1.0))
    assert not all_finite(torch.tensor(float("nan")))
