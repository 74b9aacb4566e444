"""SSR-Merge: least squares on what the adapters' A make of the inputs."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LowRank
from covmerge.errors import TensorError
from covmerge.methods import registry
from tests.methods.groups import group_of, random_updates, relative

SSR, REGMEAN = registry.get("ssr"), registry.get("regmean")


def merge(method, group, **parameters):
    return method(group, **method.resolve(parameters)).delta


def adapters(d_out=20, d_in=30, ranks=(2, 3, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [LowRank(draw(d_out, rank), draw(rank, d_in)) for rank in ranks]


def data_of(updates):
    return [
        own.value for own in group_of(SSR, [update.dense() for update in updates]).expert_statistics
    ]


@pytest.mark.parametrize("shape", [(12, 12), (20, 12)])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_of_updates_that_read_all_inputs_it_is_regmean(shape, ridge):
    group = group_of(SSR, random_updates(*shape, 3, 12, 30.0, seed=1), [1.0, 2.0, 0.5])
    regmean = merge(REGMEAN, group, off_diagonal=1.0, ridge=ridge / 3)
    assert relative(merge(SSR, group, ridge=ridge), regmean) < 1e-10


def test_it_is_the_published_form_on_the_adapters_own_factors():
    updates = adapters()
    grams = data_of(updates)
    stack = torch.cat([update.right for update in updates])
    beside = torch.cat([update.left for update in updates], 1)
    correlation = sum(stack @ gram @ stack.T for gram in grams)
    guide = torch.cat(
        [own.right @ gram @ stack.T for own, gram in zip(updates, grams, strict=True)]
    )
    damped = correlation + 1e-4 * correlation.diagonal().mean() * torch.eye(9)
    router = torch.linalg.solve(damped, guide.T).T
    merged = covmerge.merge_layer(updates, "ssr", data=grams)
    assert isinstance(merged, LowRank) and merged.rank == 9
    assert relative(merged.dense(), beside @ router @ stack) < 1e-10


@pytest.mark.parametrize("factor", [2.0**-40, 1e6])
def test_the_ridge_knows_neither_the_inputs_scale_nor_that_of_all_factors(factor):
    updates = adapters()
    expected = covmerge.merge_layer(updates, "ssr", data=data_of(updates), ridge=0.1).dense()
    louder = [gram * factor for gram in data_of(updates)]
    assert (
        relative(covmerge.merge_layer(updates, "ssr", data=louder, ridge=0.1).dense(), expected)
        < 1e-9
    )
    moved = [LowRank(update.left / factor, update.right * factor) for update in updates]
    found = covmerge.merge_layer(moved, "ssr", data=data_of(updates), ridge=0.1).dense()
    assert relative(found, expected) < 1e-9


def test_without_a_ridge_an_adapter_and_the_full_model_of_it_are_merged_alike():
    updates = adapters()
    thin = covmerge.merge_layer(updates, "ssr", data=data_of(updates), ridge=0.0)
    full = [update.dense() for update in updates]
    folded = covmerge.merge_layer(full, "ssr", data=data_of(updates), ridge=0.0, rank_rtol=1e-9)
    assert relative(thin.dense(), folded) < 1e-8


def test_experts_are_kept_on_inputs_that_their_factors_tell_apart():
    """Nine directions of z tell nine directions of inputs apart, three of each expert."""
    parts = torch.eye(30, dtype=torch.float64)[:9].split(3)
    updates = adapters()
    data = [part.T @ part for part in parts]
    merged = covmerge.merge_layer(updates, "ssr", data=data, ridge=0.0).dense()
    for own, part in zip(updates, parts, strict=True):
        assert relative(merged @ part.T, own.dense() @ part.T) < 1e-8


def test_who_did_not_change_the_layer_leaves_with_its_data():
    one, other = random_updates(8, 12, 2, 8, 3.0, seed=2)
    group = group_of(SSR, [one, torch.zeros_like(one), other])
    two = replace(
        group,
        updates=(one, other),
        weights=(1.0, 1.0),
        expert_statistics=group.expert_statistics[::2],
    )
    assert torch.equal(merge(SSR, group), merge(SSR, two))
    alone = replace(group, updates=(one, *(torch.zeros_like(one),) * 2))
    assert torch.equal(merge(SSR, alone, ridge=0.5), one)


def test_data_that_reached_nothing_keeps_the_base():
    group = group_of(SSR, random_updates(8, 12, 2, 8, 3.0, seed=2))
    silent = tuple(
        replace(own, value=torch.zeros_like(own.value)) for own in group.expert_statistics
    )
    for ridge in (0.0, 1e-4):
        assert not merge(SSR, replace(group, expert_statistics=silent), ridge=ridge).any()


def test_data_on_inputs_that_no_update_reads_keeps_the_base():
    group = group_of(SSR, [torch.eye(4).double(), 2 * torch.eye(4).double()])
    read = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]).double())
    beside = tuple(
        replace(own, value=torch.eye(4).double() - read) for own in group.expert_statistics
    )
    updates = tuple(update @ read for update in group.updates)
    for ridge in (0.0, 1e-4):
        assert not merge(
            SSR, replace(group, updates=updates, expert_statistics=beside), ridge=ridge
        ).any()


def test_data_of_another_shape_is_named_for_adapters_too():
    with pytest.raises(
        TensorError, match=r"expert 0 is \[5, 5\], its update \[20, 30\] needs \[30, 30\]"
    ):
        covmerge.merge_layer(adapters(), "ssr", data=[torch.eye(5).double()] * 3)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_in_float32(rows):
    """Statistics of low rank are rounded in the file; nothing is divided by that rounding."""
    updates = random_updates(16, 24, 3, 4, 3.0, seed=3)
    generator = torch.Generator().manual_seed(0)
    seen = [torch.randn(rows, 24, generator=generator, dtype=torch.float64) for _ in updates]
    data = [each.T @ each / rows for each in seen]
    for ridge in (0.0, 1e-4):
        exact = covmerge.merge_layer(updates, "ssr", data=data, ridge=ridge, rank_rtol=1e-6)
        single = covmerge.merge_layer(
            [update.float() for update in updates], "ssr", data=data, ridge=ridge, rank_rtol=1e-6
        )
        assert relative(single, exact) < 1e-3
