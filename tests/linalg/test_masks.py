"""Zeros by arithmetic are the zeros that boolean masks make, bit for bit at the limit itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.maths.linalg.masks import at_least, drop_below, pack, unpack

dtypes = st.sampled_from([torch.float32, torch.float64])


@settings(max_examples=100, deadline=None)
@given(dtype=dtypes, place=st.integers(0, 63), seed=st.integers(0, 10**6))
def test_an_entry_at_the_limit_is_kept(dtype, place, seed):
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    limit = float(values[place].abs())
    expected = values.masked_fill(values.abs() < limit, 0.0)
    assert torch.equal(drop_below(values, limit), expected)
    assert torch.equal(at_least(values.abs(), limit), (values.abs() >= limit).to(dtype))


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_no_limit_keeps_all(limit):
    values = torch.tensor([0.0, -2.0, 1e-40])
    assert torch.equal(drop_below(values, limit), values)
    assert at_least(values.abs(), limit).tolist() == [1.0, 1.0, 1.0]


def test_denormal_limits_are_limits():
    values = torch.tensor([1e-42, 2e-42, 0.0])
    assert drop_below(values, 2e-42).tolist() == [0.0, float(torch.tensor(2e-42)), 0.0]


@pytest.mark.parametrize("shape", [(9,), (3, 9)])
def test_bits_come_back_as_a_mask(shape):
    mask = torch.arange(27)[: torch.Size(shape).numel()].view(shape) % 2 == 0
    found = unpack(pack(mask), shape)
    assert found.dtype == torch.bool and torch.equal(found, mask)
