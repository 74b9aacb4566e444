"""`merge_layer` on updates in float64 that were made of narrower numbers."""

import pytest
import torch

from covmerge import merge_layer
from covmerge.base.types import LowRank
from covmerge.errors import TensorError
from tests.methods.groups import relative


def folded(ratio, name):
    """A base, adapters multiplied out in float32, and the merge of their factors in float64."""
    generator = torch.Generator().manual_seed(0)
    base = 0.02 * torch.randn(96, 128, generator=generator)
    pairs = [
        (
            torch.randn(96, 8, generator=generator),
            4**t * ratio / 1000 * torch.randn(8, 128, generator=generator),
        )
        for t in range(3)
    ]
    products = [(left @ right) for left, right in pairs]
    exact = merge_layer([LowRank(b.double(), a.double()) for b, a in pairs], name).dense()
    return base, products, exact


@pytest.mark.parametrize("name", ["ace", "iso_c"])
def test_rounded_products_are_warned_of_and_merged_as_their_factors_where_it_is_said(name):
    _, products, exact = folded(1, name)
    updates = [product.double() for product in products]
    with pytest.warns(UserWarning, match="look like rounding of float32.*stored=torch.float32"):
        unsaid = merge_layer(updates, name)
    assert relative(unsaid, exact) > 0.1
    assert relative(merge_layer(updates, name, stored=torch.float32), exact) < 1e-4


@pytest.mark.parametrize("name", ["ace", "iso_c"])
@pytest.mark.parametrize("ratio", [1, 10])
def test_differences_of_rounded_weights_too(ratio, name):
    base, products, exact = folded(ratio, name)
    updates = [(base + product).double() - base.double() for product in products]
    with pytest.warns(UserWarning, match="look like rounding of float32"):
        merge_layer(updates, name)
    found = merge_layer(updates, name, stored=torch.float32, base=base.double())
    assert relative(found, exact) < 1e-3


def test_updates_that_are_exact_are_not_warned_of():
    generator = torch.Generator().manual_seed(0)
    update = torch.randn(24, 32, generator=generator).double()
    merge_layer([update, 2 * update], "ace")  # of few digits, and of full rank
    tail = torch.logspace(0, -9, 24, dtype=torch.float64)[:, None] / 3
    merge_layer([update * tail, 2 * update * tail], "ace")  # of all digits


@pytest.mark.parametrize(
    ("updates", "stored", "said"),
    [
        ([torch.ones(2, 2)], torch.int8, "floating-point dtype"),
        ([LowRank(torch.ones(2, 1), torch.ones(1, 2))], torch.float32, "update.dense()"),
    ],
)
def test_what_cannot_be_said_is_refused(updates, stored, said):
    with pytest.raises(TensorError, match=said):
        merge_layer(updates, "iso_c", stored=stored)
