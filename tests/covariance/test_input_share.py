"""How many of a layer's directions an update uses, where float32 resolves it and where it does not."""

import pytest
import torch

from covmerge.maths.covariance import input_share
from covmerge.maths.covariance.input_share import share_used


def in_a_corner(size, rank, seed=0):
    """An update of a few directions, on 64 inputs and outputs of many."""
    generator = torch.Generator().manual_seed(seed)
    update = torch.zeros(size, size)
    left, right = (torch.randn(64, rank, generator=generator) for _ in range(2))
    update[:64, :64] = left @ right.mT
    return update


@pytest.mark.parametrize("rank", [1, 16])
def test_a_large_layer_of_which_little_is_used(rank):
    """10⁴ m times the eps of float32 is above 1 here."""
    few = in_a_corner(2048, rank)
    many = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(1))
    sizes = [float(update.norm()) for update in (few, many)]
    exact = [
        share_used(update.double(), size, 2048)
        for update, size in zip((few, many), sizes, strict=True)
    ]
    assert exact[0] < 0.02 < 0.8 < exact[1]
    found = [share_used(u, size, 2048) for u, size in zip((few, many), sizes, strict=True)]
    assert found == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (24, 40), (40, 24)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, None])
def test_it_is_the_same_of_the_transpose(shape, rank):
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(3, *shape, generator=generator)
    if rank is not None:
        right = torch.randn(3, rank, shape[1], generator=generator)
        updates = torch.randn(3, shape[0], rank, generator=generator) @ right
    sizes = [float(update.norm()) for update in updates]
    alone = [share_used(u, size, min(shape)) for u, size in zip(updates, sizes, strict=True)]
    values = [torch.linalg.svdvals(u.double()).square() for u in updates]
    m = min(shape)
    naive = [
        float((1e4 * m * v / v.sum()).log1p().sum() / m / torch.tensor(10001.0).log())
        for v in values
    ]
    assert alone == pytest.approx(naive, abs=3e-4)
    turned = [share_used(u.mT, size, m) for u, size in zip(updates, sizes, strict=True)]
    assert turned == pytest.approx(alone, abs=3e-4)


def test_float64_is_taken_only_where_float32_does_not_tell(monkeypatch):
    def refused(_):
        raise AssertionError("float32 would have done")

    monkeypatch.setattr(input_share, "float64_gram", refused)
    update = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    assert share_used(update, float(update.norm()), 512) > 0.8
    with pytest.raises(AssertionError, match="would have done"):
        share_used(in_a_corner(2048, 1), float(in_a_corner(2048, 1).norm()), 2048)
