"""What is kept of an update is that of a stable sort, however its rows come."""

import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.maths.linalg import select
from covmerge.maths.methods.sparsify import Rows, keep

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def by_sorting(update, how, density, gamma):
    """The update where a stable sort of its magnitudes keeps it."""
    sizes, count = update.abs().float().flatten(), update.numel()
    most = int(density * count)
    if density >= 1:
        return update
    if how == "magnitude":
        most = max(1, most) if density > 0 else 0
        places = sizes.argsort(descending=True, stable=True)[:most]
    else:
        first = max(0, count - most - int(gamma * count))
        places = sizes.argsort(stable=True)[first : first + most]
    kept = torch.zeros_like(sizes, dtype=torch.bool)
    kept[places] = True
    return update * kept.view(update.shape)


def in_blocks(update, cuts):
    """An update in blocks of rows that end at `cuts`."""
    bounds = [0, *sorted(set(cuts)), len(update)]
    pairs = [(a, b) for a, b in pairwise(bounds) if a < b]

    def blocks():
        for a, b in pairs:
            yield Rows(update[a:b], torch.rand)

    return blocks, pairs


def by_rows(update, cuts, how, **given):
    blocks, pairs = in_blocks(update, cuts)
    kept = keep(blocks, update.shape, how, **given)
    return torch.cat([kept.rows(range(a, b)).of(update[a:b].clone()) for a, b in pairs])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("how", ["magnitude", "band"])
@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 9)),
    magnitudes=st.integers(1, 6) | st.just(10**5),
    density=st.floats(0, 1.2) | st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    gamma=st.floats(0, 1),
    cuts=st.lists(st.integers(1, 11), max_size=5),
    seed=st.integers(0, 10**6),
)
def test_rows_may_be_cut_anywhere(
    how, sampled, dtype, shape, magnitudes, density, gamma, cuts, seed
):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-magnitudes, magnitudes + 1, shape, generator=generator)
    update = (whole / 7).to(dtype)
    cuts = [cut for cut in cuts if cut < len(update)]
    with pytest.MonkeyPatch.context() as patch:
        if sampled:
            patch.setattr(select, "_LEAST_SAMPLED", 8)
        found = by_rows(update, cuts, how, density=density, gamma=gamma)
    assert torch.equal(found, by_sorting(update, how, density, gamma))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["magnitude", "band"])
@pytest.mark.parametrize("density", [0.001, 0.25, 0.5, 0.999])
def test_of_magnitudes_that_are_all_equal_as_many_are_kept_as_of_others(density, how, dtype):
    signs = torch.randint(2, (40, 25), generator=torch.Generator().manual_seed(1)) * 2 - 1
    update = (signs * 0.37).to(dtype)
    found = by_rows(update, [1, 7, 20], how, density=density, gamma=0.1)
    assert int((found != 0).sum()) == int(density * 1000)
    assert torch.equal(found, by_sorting(update, how, density, 0.1))


def test_many_values_that_are_stored_in_half_precision():
    """Where nearly every threshold falls among equal magnitudes."""
    generator = torch.Generator().manual_seed(2)
    base = (0.02 * torch.randn(1100, 1000, generator=generator)).bfloat16()
    model = (base.float() + 1e-3 * torch.randn(1100, 1000, generator=generator)).bfloat16()
    for update in (model - base, model.float() - base.float()):
        for how in ("magnitude", "band"):
            found = by_rows(update, [300, 777], how, density=0.2, gamma=0.01)
            assert torch.equal(found, by_sorting(update, how, 0.2, 0.01))
            assert int((found != 0).sum()) == 220_000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["magnitude", "band"])
def test_no_more_than_a_block_is_held(how, dtype, monkeypatch):
    """While thresholds are looked for, in a sample, among all and among equal ones."""
    monkeypatch.setattr(select, "_LEAST_SAMPLED", 1000)
    alive = weakref.WeakSet()
    most = 0

    def blocks():
        nonlocal most
        for number in range(50):
            generator = torch.Generator().manual_seed(number)
            block = (torch.randint(-300, 301, (1, 100), generator=generator) / 7).to(dtype)
            alive.add(block.untyped_storage())
            most = max(most, len(alive))
            yield Rows(block, torch.rand)

    assert len(keep(blocks, (50, 100), how, density=0.3, gamma=0.05).limits) > 1
    assert 0 < most <= 3


@pytest.mark.parametrize("how", ["magnitude", "band"])
def test_lengths_are_brought_back_of_blocks_as_of_the_whole(how):
    update = torch.randint(-3, 4, (30, 8), generator=torch.Generator().manual_seed(3)).float()
    given = {"density": 0.4, "gamma": 0.1, "rescale": True}
    found = by_rows(update, [3, 4, 19], how, **given)
    assert torch.equal(found, by_rows(update, [], how, **given))
    assert float(found.abs().sum()) == pytest.approx(float(update.abs().sum()), rel=1e-5)
