"""The k-th magnitude of a streamed vector, and random numbers that belong to a place."""

import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.maths.linalg import select
from covmerge.maths.linalg.random import Stream
from covmerge.maths.linalg.select import MagnitudeSelect, kth_magnitude, threshold_rank

DTYPES = [torch.float32, torch.float64]
# Zeros of both signs, subnormals and the largest numbers among the rest.
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38, 1.0, -1.0]


def sorted_magnitude(vector, rank):
    return float(vector.abs().flatten().sort().values[rank - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from(SPECIAL)), min_size=1, max_size=60
    ),
    data=st.data(),
)
def test_kth_magnitude_is_that_of_sorting(dtype, values, data):
    vector = torch.tensor(values, dtype=dtype)
    rank = data.draw(st.integers(1, len(values)))
    assert kth_magnitude(vector, rank) == sorted_magnitude(vector, rank)


def test_a_search_that_finds_nothing_anywhere_ends(monkeypatch):
    """Old: on GPUs, where nothing was ever counted inside, it went on for ever."""
    monkeypatch.setattr(select, "_split", lambda numbers, width: (0, numbers[:0]))
    with pytest.raises(ValueError, match="rank 2 is at none of all magnitudes"):
        kth_magnitude(torch.tensor([1.0, 2.0, 3.0]), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 400, 2999, 3000])
def test_equal_magnitudes_count_one_by_one(dtype, rank):
    generator = torch.Generator().manual_seed(0)
    vector = torch.randint(-20, 20, (50, 60), generator=generator).to(dtype) / 7
    assert kth_magnitude(vector, rank) == sorted_magnitude(vector, rank)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 300), block=st.integers(1, 50), seed=st.integers(0, 100), data=st.data())
def test_blocks_in_any_order_find_the_same(dtype, size, block, seed, data):
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    rank = data.draw(st.integers(1, size))
    search = MagnitudeSelect(rank, dtype)
    blocks = vector.split(block)
    passes = 0
    while not search.settled:
        passes += 1
        blocks = blocks[::-1]
        for part in blocks:
            search.add(part)
        search.end_pass()
    assert search.value == sorted_magnitude(vector, rank)
    assert passes == {torch.float32: 2, torch.float64: 4}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 300),
    seed=st.integers(0, 100),
    off=st.floats(-1, 1) | st.floats(-0.05, 0.05),
    bits=st.sampled_from([5, 7]),
    data=st.data(),
)
def test_a_guess_changes_passes_alone(dtype, size, seed, off, bits, data):
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    rank = data.draw(st.integers(1, size))
    expected = sorted_magnitude(vector, rank)
    search = MagnitudeSelect(rank, dtype, near=abs(expected * (1 + off)), bits=bits)
    passes = 0
    while not search.settled:
        passes += 1
        search.add(vector)
        search.end_pass()
    assert search.value == expected
    usual, guessed = {torch.float32: (2, 1), torch.float64: (4, 3)}[dtype]
    assert passes in (guessed, guessed + 1, usual + 2)
    if abs(off) < 2 ** -(bits + 2):  # what is off is of the guess, which may be half as large again
        assert passes == guessed
    elif abs(off) < 3 * 2 ** -(bits + 2):
        assert passes <= guessed + 1


def test_rank_0_is_0_whatever_was_guessed():
    search = MagnitudeSelect(0, torch.float32, near=1.0)
    assert search.settled and search.value == 0.0


@pytest.mark.parametrize("near", [0.0, 1e-45, 3.4e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_may_be_guessed(dtype, near):
    vector = torch.tensor([0.0, -0.0, 1e-45, 2.0, -3.4e38, 3.4e38], dtype=dtype)
    for rank in range(1, 7):
        search = MagnitudeSelect(rank, dtype, near=near)
        while not search.settled:
            search.add(vector)
            search.end_pass()
        assert search.value == sorted_magnitude(vector, rank)


@pytest.mark.parametrize("density", [1e-9, 0.2, 0.999, 1.0])
def test_the_rank_may_follow_from_the_count(density):
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    search = MagnitudeSelect(partial(threshold_rank, density), torch.float32)
    while not search.settled:
        for part in vector.split(300):
            search.add(part)
        search.end_pass()
    assert search.value == kth_magnitude(vector, threshold_rank(density, 1000))
    assert int((vector.abs() >= search.value).sum()) == min(1000, int(density * 1000) + 1)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 200), seed=st.integers(0, 100), data=st.data())
def test_wider_values_are_kept_by_the_threshold_as_they_were_counted(size, seed, data):
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, generator=generator, dtype=torch.float64)
    rank = data.draw(st.integers(1, size))
    search = MagnitudeSelect(rank, torch.float32)
    while not search.settled:
        search.add(vector)
        search.end_pass()
    assert search.value <= sorted_magnitude(vector, rank)
    assert search.value == pytest.approx(sorted_magnitude(vector, rank), rel=2e-7)
    assert int((vector.abs() >= search.value).sum()) == size - rank + 1


def test_a_block_larger_than_a_part(monkeypatch):
    monkeypatch.setattr(select, "_PART", 64)
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert kth_magnitude(vector, 300) == sorted_magnitude(vector, 300)


def test_ranks_of_a_vector_that_is_sampled_first(monkeypatch):
    monkeypatch.setattr(select, "_LEAST_SAMPLED", 64)
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for rank in (1, 300, 1000):
        assert kth_magnitude(vector, rank) == sorted_magnitude(vector, rank)


def test_rows_and_transposes_are_vectors_too():
    matrix = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    assert kth_magnitude(matrix.T, 100) == kth_magnitude(matrix, 100)


def test_rank_zero_is_zero_without_a_pass():
    assert MagnitudeSelect(0, torch.float32).settled
    assert kth_magnitude(torch.ones(3), 0) == 0.0
    assert kth_magnitude(torch.empty(0), 0) == 0.0


def test_too_few_values_are_named():
    with pytest.raises(ValueError, match="rank 4 of 3 values"):
        kth_magnitude(torch.ones(3), 4)


def test_an_open_selection_has_no_value():
    with pytest.raises(ValueError, match="another pass"):
        _ = MagnitudeSelect(1, torch.float32).value


# Random numbers


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 70), size=st.integers(0, 70), seed=st.integers(0, 5))
def test_any_range_of_places_has_the_same_numbers(start, size, seed):
    whole = Stream("fc").uniform(seed, (140,))
    part = Stream("fc", offset=start).uniform(seed, (size,))
    assert torch.equal(part, whole[start : start + size])


def test_places_far_away_need_not_be_drawn():
    # More numbers than any memory holds lie before it.
    far = Stream("fc", offset=2**50 + 3).uniform(0, (16,))
    near = Stream("fc", offset=2**50).uniform(0, (19,))
    assert torch.equal(far, near[3:])


def test_seed_and_name_both_count():
    draws = [Stream(name).uniform(seed, (8,)) for name in ("a", "b", "1\0a") for seed in (0, 1, 11)]
    assert len({tuple(numbers.tolist()) for numbers in draws}) == len(draws)


def test_numbers_are_uniform():
    numbers = Stream("fc").uniform(0, (1000, 1000))
    assert numbers.dtype == torch.float32
    assert 0 <= numbers.min()
    assert numbers.max() < 1
    shares = torch.histc(numbers, bins=50, min=0, max=1) / numbers.numel()
    assert (shares - 1 / 50).abs().max() < 1e-3
    neighbours = torch.corrcoef(torch.stack([numbers.flatten()[:-1], numbers.flatten()[1:]]))
    assert neighbours[0, 1].abs() < 5e-3


def test_the_numbers_never_change():
    """A recipe with a seed must give the same model with every later version."""
    assert Stream("fc.weight/expert").uniform(0, (2, 2)).tolist() == [
        [0.5592340230941772, 0.9880593419075012],
        [0.611984372138977, 0.8447691798210144],
    ]


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3, 4)])
def test_any_shape(shape):
    assert Stream("fc").uniform(0, shape).shape == shape


def test_counters_sent_to_another_process_are_not_shared():
    select = MagnitudeSelect(1, torch.float32)
    sent = pickle.loads(ForkingPickler.dumps(select))
    sent.add(torch.ones(3))
    assert int(select._counts.sum()) == 0
    select.absorb_counted(memoryview(sent.counted()))
    assert int(select._counts.sum()) == 3
